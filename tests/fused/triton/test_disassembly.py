"""Reading of disassembled kernels."""

from __future__ import annotations

from benchmarks.disassembly import parsed

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
