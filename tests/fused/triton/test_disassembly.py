"""Reading of disassembled kernels, and the figures of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.disassembly import parsed

RESULTS = Path("benchmarks/results")

CODE = """
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   MOV R2, RZ ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0040*/                   MUFU.EX2 R4, R4 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
.L_x_3:
        /*0070*/                   FADD R4, R4, 1 ;
        /*0080*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*0090*/                   BRA `(.L_x_4);
        /*00a0*/                   NOP;
"""


def test_a_jump_back_from_code_out_of_line_is_no_loop():
    code = parsed(CODE, registers=24)
    assert code.instructions == ["LDC", "MOV", "LDG.E.128", "BRA", "MUFU.EX2", "BRA", "EXIT", "FADD", "BRA"]
    assert code.loops() == [["LDG.E.128", "BRA", "MUFU.EX2", "BRA", "FADD", "BRA"]]
    assert code.registers == 24


def test_code_without_a_loop_has_none():
    assert parsed(CODE.replace("@P1 BRA `(.L_x_1)", "FADD R4, R4, 1"), registers=24).loops() == []


def figures(path):
    return json.loads(path.read_text())["results"]["kernels"]


def check_the_limits(kernels):
    """Limits of the kernels whose number of instructions decides their speed."""
    (loop,) = kernels["cross entropy 128256: logit_statistics_kernel"]["loops"]
    assert loop["instructions"] <= 122 and loop["loads"] == {"128": 2}
    assert loop["mufu"] <= 16 + 3, "one exponential for each element, and of the lane"
    assert kernels["cross entropy 128256: logit_statistics_kernel"]["registers"] <= 32
    (loop,) = kernels["cross entropy 128256, softcap: logit_statistics_kernel"]["loops"]
    assert loop["instructions"] <= 220 and loop["mufu"] <= 3 * 16 + 3
    (loop,) = kernels["cross entropy 50257: logit_statistics_kernel"]["loops"]
    assert loop["instructions"] <= 145 and loop["mufu"] <= 16 + 3
    for keys in ("causal softmax 1024", "bool-masked softmax 1024", "mask-added softmax 1024"):
        forward = kernels[f"{keys}: masked_softmax"]
        assert forward["instructions"] <= 712 and set(forward["loads"]) == set(forward["stores"]) == {"128"}
    for name in ("rms_norm 4096", "layer_norm 4096", "add + rms_norm 4096"):
        assert kernels[f"{name}: norm_backward"]["shared"] > 2**14, "room for the next rows"
    assert {name for name, kernel in kernels.items() if kernel["spills"]} <= {
        "rms_norm 16384: norm_backward",
        "layer_norm 16384: norm_backward",
    }


def test_the_figures_hold_the_limits():
    before, after = figures(RESULTS / "sass_sm90_before.json"), figures(RESULTS / "sass_sm90.json")
    check_the_limits(after)
    with pytest.raises(AssertionError):
        check_the_limits(before)
    assert before.keys() <= after.keys()
    for name in before:
        if any(part in name for part in ("gelu", "silu", "swiglu", "softmax", "cross entropy", "rotary")):
            most = before[name]["instructions"] * (1.02 if "bool-masked" in name else 1)
            assert after[name]["instructions"] <= most, name


@pytest.mark.slow
def test_the_figures_are_those_of_the_kernels(tmp_path):
    out = tmp_path / "figures.json"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-m", "benchmarks.sass", "--out", str(out)], env=environment, check=True, timeout=500
    )
    check_the_limits(figures(out))
