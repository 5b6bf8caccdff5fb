"""Solutions in C++ and CUDA: compiled where there is a compiler, and judged like others."""

from __future__ import annotations

import json
import shutil

import pytest

from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.submission import SubmissionError, from_path

CPP = """
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

static float wide(uint16_t bits) { uint32_t all = uint32_t(bits) << 16; float x; std::memcpy(&x, &all, 4); return x; }
static uint16_t narrow(float x) {
  uint32_t all; std::memcpy(&all, &x, 4);
  if (x != x) return 0x7fc0;
  return uint16_t((all + 0x7fff + ((all >> 16) & 1)) >> 16);
}
void scale(tvm::ffi::TensorView x, tvm::ffi::TensorView w, tvm::ffi::TensorView y) {
  const uint16_t* in = static_cast<const uint16_t*>(x.data_ptr());
  const uint16_t* weight = static_cast<const uint16_t*>(w.data_ptr());
  uint16_t* out = static_cast<uint16_t*>(y.data_ptr());
  int64_t rows = x.size(0), n = x.size(1), step = x.stride(0);
  for (int64_t r = 0; r < rows; ++r) {
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += wide(in[r * step + i]) * wide(in[r * step + i]);
    float s = 1.0f / std::sqrt(sum / n + 1e-6f);
    for (int64_t i = 0; i < n; ++i) out[r * n + i] = narrow(wide(in[r * step + i]) * s * wide(weight[i]) * FACTOR);
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, scale);
"""


def solution(tmp_path, text, language="cpp", **spec):
    entry = f"main.{'cu' if language == 'cuda' else 'cpp'}"
    spec = {"language": language, "entry_point": f"{entry}::scale", **spec}
    path = tmp_path / "solution.json"
    sources = [{"path": entry, "content": text}, {"path": "factor.h", "content": "#define FACTOR 1.0f"}]
    path.write_text(json.dumps({"name": "mine", "definition": "rmsnorm_h512", "spec": spec, "sources": sources}))
    return str(path)


needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler (c++) here")


@needs_compiler
@pytest.mark.parametrize(("factor", "passed"), [('#include "factor.h"', True), ("#define FACTOR 1.02f", False)])
def test_a_solution_in_cpp_is_compiled_and_judged(tmp_path, server, factor, passed):
    pytest.importorskip("tvm_ffi", reason="pip install apache-tvm-ffi")
    verdict = judge(solution(tmp_path, factor + CPP), "rmsnorm_h512", examples=2, seed=3, server=server)
    assert verdict.passed == passed, verdict
    if not passed:
        assert verdict.failure.guess == "every element is 1.02 x what is right"


@needs_compiler
def test_what_the_compiler_says_is_in_the_verdict(tmp_path, server):
    pytest.importorskip("tvm_ffi", reason="pip install apache-tvm-ffi")
    verdict = judge(solution(tmp_path, "int main( {"), "rmsnorm_h512", server=server)
    assert verdict.grade == "not judged" and verdict.code == "not-loaded"
    assert "refuses the sources: main.cpp:1:" in verdict.failure.message


def test_cuda_needs_a_gpu(tmp_path, server):
    verdict = judge(solution(tmp_path, CPP, "cuda"), "rmsnorm_h512", server=server)
    assert verdict.code == "needs-cuda", verdict


def test_without_a_compiler_nothing_is_judged(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    from flashinfer_trace.judging.compiled import CompileError, _compiler

    with pytest.raises(CompileError, match="install c\\+\\+, or name one in CXX"):
        _compiler("cpp")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"binding": "pybind"}, "tvm-ffi and torch can be compiled"),
        ({"entry_point": "factor.h::scale"}, "is in no .cpp or .cc or"),
        ({"entry_point": "main.cpp::a-b"}, "is not the name of a function"),
    ],
)
def test_a_spec_that_cannot_be_compiled(tmp_path, spec, message):
    with pytest.raises(SubmissionError, match=message):
        from_path(solution(tmp_path, CPP, **spec))
