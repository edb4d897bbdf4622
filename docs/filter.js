// A field above each long table that hides the rows without its words.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const rows = [...table.tBodies].flatMap((body) => [...body.rows]);
    if (rows.length < 50) continue;
    const field = document.createElement("input");
    field.type = "search";
    field.className = "filter";
    field.placeholder = `filter ${rows.length} rows: a name, a rule, a reason`;
    field.setAttribute("aria-label", "filter the rows of the table");
    const texts = rows.map((row) => row.innerText.toLowerCase());
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      rows.forEach((row, at) => { row.hidden = !words.every((word) => texts[at].includes(word)); });
    });
    const frame = document.createElement("div");
    frame.className = "filtered";
    table.before(field, frame);
    frame.append(table);
  }
});
