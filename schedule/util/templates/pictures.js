(() => {
  const page = document.querySelector(".pictures"), panel = page.querySelector(".module");
  const buttons = [...page.querySelectorAll("nav button.name")];
  const byPath = new Map(buttons.flatMap((button) => JSON.parse(button.dataset.paths).map((path) => [path, button])));
  const copy = (id) => document.getElementById(id).content.cloneNode(true);

  const others = new WeakMap();  // of a button for all nodes: the drawing that is not shown

  function show(button) {
    buttons.forEach((each) => each.setAttribute("aria-current", each === button));
    panel.replaceChildren(copy(button.dataset.module));
    for (const place of panel.querySelectorAll("[data-picture]")) place.append(copy(place.dataset.picture));
    for (const sides of panel.querySelectorAll(".sides")) arrange(sides);
    panel.dataset.path = JSON.parse(button.dataset.paths)[0];
  }

  const natural = (svg) => svg.viewBox.baseVal.width;
  function scale(svg, to) {
    svg.dataset.scale = to;
    svg.setAttribute("width", natural(svg) * to);
    svg.setAttribute("height", svg.viewBox.baseVal.height * to);
  }
  const room = (svg) => svg.parentElement.clientWidth - 20;
  const least = (svg) => svg.closest(".stacked") ? 0.5 : 0.7;
  function fit(svg) {
    scale(svg, Math.max(least(svg), Math.min(1, room(svg) / natural(svg))));
  }

  // Graphs too wide to stand side by side are one below the other; both are scrolled to the same change.
  function arrange(sides) {
    const graphs = [...sides.querySelectorAll("svg.graph")];
    sides.classList.remove("stacked");
    const wide = graphs.some((svg) => natural(svg) * least(svg) > room(svg));
    sides.classList.toggle("stacked", graphs.length > 1 && wide);
    graphs.forEach(fit);
    center(graphs);
  }
  function center(graphs) {
    const changes = graphs.map((svg) => new Set([...svg.querySelectorAll("[data-change]")].map((n) => n.dataset.change)));
    const common = [...changes[0]].find((number) => changes.every((each) => each.has(number)));
    const marked = common === undefined ? ".marked" : `[data-change="${common}"]`;
    const nodes = graphs.map((svg) => svg.querySelector(marked)).filter((node) => node);
    const views = nodes.map((node) => node.closest(".view"));
    const below = nodes.map((node, i) => {
      node.closest("svg").style.marginTop = 0;
      return node.getBoundingClientRect().top - views[i].getBoundingClientRect().top + views[i].scrollTop;
    });
    const at = Math.min(Math.max(...below), ...views.map((view) => view.clientHeight * 0.35));
    nodes.forEach((node, i) => {
      const view = views[i], box = node.getBoundingClientRect(), frame = view.getBoundingClientRect();
      view.scrollLeft += box.left + box.width / 2 - frame.left - frame.width / 2;
      node.closest("svg").style.marginTop = `${Math.max(0, at - below[i])}px`;
      view.scrollTop = below[i] - at;
    });
  }

  function tell(node) {
    const about = panel.querySelector(".about"), number = node.dataset.change;
    about.textContent = node.querySelector("title").textContent;
    for (const each of panel.querySelectorAll(".node")) {
      each.classList.toggle("near", number !== undefined && each.dataset.change === number);
      each.classList.toggle("now", each === node);
    }
    if (!node.dataset.path) return;
    const path = panel.dataset.path ? `${panel.dataset.path}.${node.dataset.path}` : node.dataset.path;
    const target = byPath.get(path);
    if (!target) return;
    const open = document.createElement("button");
    open.textContent = `open ${path}`;
    open.addEventListener("click", () => { show(target); target.focus({preventScroll: true}); });
    about.append("\n", open);
  }

  page.addEventListener("click", (event) => {
    const on = (selector) => event.target.closest(selector);
    if (on("button.name")) {
      show(on("button.name"));
      if (panel.getBoundingClientRect().top > innerHeight * 0.6) panel.scrollIntoView();
    } else if (on("button.toggle")) {
      const toggle = on("button.toggle"), open = toggle.getAttribute("aria-expanded") !== "true";
      toggle.setAttribute("aria-expanded", open);
      document.getElementById(toggle.getAttribute("aria-controls")).hidden = !open;
    } else if (on("[data-zoom]")) {
      const svg = on("figure").querySelector("svg.graph"), by = Number(on("[data-zoom]").dataset.zoom);
      if (by) scale(svg, Math.min(2, Math.max(0.3, svg.dataset.scale * by)));
      else fit(svg);
    } else if (on("[data-whole]")) {
      const button = on("[data-whole]"), shown = on("figure").querySelector("svg.graph");
      shown.replaceWith(others.get(button) || copy(button.dataset.whole).firstElementChild);
      others.set(button, shown);
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      arrange(on(".sides"));
    } else if (on("svg .node")) {
      tell(on("svg .node"));
    }
  });
  panel.addEventListener("mouseover", (event) => {
    const node = event.target.closest(".node");
    if (node) tell(node);
  });
  panel.addEventListener("focusin", (event) => {
    if (event.target.matches(".node")) tell(event.target);
  });
  panel.addEventListener("keydown", (event) => {
    const svg = event.target.closest("svg.graph");
    const step = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1}[event.key];
    if (!svg || !step) return;
    const nodes = [...svg.querySelectorAll(".node")], at = nodes.indexOf(event.target);
    nodes[Math.min(nodes.length - 1, Math.max(0, at + step))].focus();
    event.preventDefault();
  });
  const first = buttons.find((button) => button.dataset.first !== undefined) || buttons[0];
  if (first) show(first);
})();
