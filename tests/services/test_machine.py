"""In which number type this machine computes."""

from pathlib import Path

import pytest
import torch

from services.machine import computing_dtype

_ZEN3 = "flags\t\t: fpu sse4_2 avx avx2 fma f16c bmi2\n"
_SKYLAKE_X = "flags\t\t: fpu avx2 fma avx512f avx512dq avx512cd avx512bw avx512vl\n"
_KNIGHTS_LANDING = "flags\t\t: fpu avx2 fma avx512f avx512pf avx512er avx512cd\n"
_NEOVERSE_V1 = "Features\t: fp asimd sve i8mm bf16 dgh\n"
_NEOVERSE_N1 = "Features\t: fp asimd lrcpc dcpop\n"


def machine(directory: Path, cpu_info: str, *devices: str) -> tuple[Path, Path]:
    (directory / "cpuinfo").write_text(f"processor\t: 0\n{cpu_info}")
    (directory / "dev").mkdir()
    for device in devices:
        (directory / "dev" / device).touch()
    return directory / "cpuinfo", directory / "dev"


@pytest.mark.parametrize(
    ("cpu_info", "expected"),
    [
        (_ZEN3, "float32"),
        (_SKYLAKE_X, "bfloat16"),
        (_KNIGHTS_LANDING, "float32"),
        (_NEOVERSE_V1, "bfloat16"),
        (_NEOVERSE_N1, "float32"),
    ],
)
def test_a_processor_that_multiplies_in_bfloat16_is_told_from_one_that_does_not(tmp_path, cpu_info, expected):
    assert computing_dtype(*machine(tmp_path, cpu_info, "null")) == expected


@pytest.mark.parametrize("device", ["nvidia0", "nvidia11", "kfd"])
def test_a_gpu_computes_in_bfloat16_whatever_the_processor(tmp_path, device):
    assert computing_dtype(*machine(tmp_path, _ZEN3, device)) == "bfloat16"


def test_the_driver_alone_is_no_gpu(tmp_path):
    assert computing_dtype(*machine(tmp_path, _ZEN3, "nvidiactl")) == "float32"


def test_a_system_that_does_not_say_is_left_with_bfloat16(tmp_path):
    assert computing_dtype(tmp_path / "none", tmp_path) == "bfloat16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU decides here")
def test_pytorch_agrees_about_this_processor():
    supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert computing_dtype() == ("bfloat16" if supported else "float32")
