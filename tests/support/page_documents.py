"""Small and large hand-made op traces with their kernel traces, valid against the schemas."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jsonschema
import made_up_traces

from tools.kernel_tracing.report.trace_files import packed
from tools.op_tracing import page

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = {
    name: jsonschema.Draft202012Validator(json.loads((ROOT / f"schema/{name}.schema.json").read_text("utf-8")))
    for name in ("op_traces", "kernel_traces")
}
MODEL, LINEAR = "sglang/srt/models/m.py", "sglang/srt/layers/linear.py"
SOURCE = {"version": "1.0", "sha256": "ab" * 32}
HEAD = {"sources": {"sglang": SOURCE, "sgl-kernel": SOURCE}, "model": "small", "platform": "cuda"}
#: Markup, an end of the script element, quotes, an escape, and a character that ends a line in JavaScript but not JSON.
HOSTILE = "<img/src=x/onerror=document.title='owned'>"
HOSTILE_TEXT = (
    f"</script><script>document.title='owned'</script> <!-- {HOSTILE} \"double\" 'single' &lt; \\u003c \u2028 é"
)


def site(line, function="Layer.forward", file=MODEL, **more):
    return {"file": file, "line": line, "function": function, **more}


def frame(line, function, call, file=MODEL):
    return {"file": file, "line": line, "function": function, "call": call}


def kernel(name, chains, source="sgl-kernel", line=7, only=None):
    return {
        "name": name,
        "source": source,
        "category": "gemm",
        "definition": {"file": "sgl_kernel/gemm.py", "line": line},
        "chains": [made_up_traces.chain(*frames, only=only) for frames in chains],
    }


def used(kernel, condition=""):
    common = {key: kernel[key] for key in ("name", "source", "definition")}
    return common | {"condition": condition, "phases": ["prefill"]}


def node(name, kind, *children, annotation="", sites=(), **more):
    common = {"name": name, "kind": kind, "annotation": annotation, "call_sites": list(sites)}
    return {**common, "children": list(children), **more}


def documents():
    """A small op trace and its kernel traces, with every kind of node, and with long and hostile texts."""
    entry = frame(90, "Model.forward", "self.layer(x)")
    inner = frame(40, "Linear.forward", "fp8_gemm(x, w)", file=LINEAR)
    through = [[inner, frame(line, "Layer.forward", "self.q_proj(x)"), entry] for line in (12, 13)]
    elsewhere = [inner, frame(700, "Other.forward", "self.lm_head(x)")]
    gemm = kernel("fp8_gemm", [*through, elsewhere], only="small-fp8")
    twin = kernel("fp8_gemm", [[frame(41, "Linear.forward", "fp8_gemm[grid](x)", file=LINEAR)]], "triton", 70)
    many = [[frame(n, "f", f"attend_{n}(q)"), frame(20, "Layer.forward", "self.attn(q)"), entry] for n in range(1, 13)]
    attend = kernel("attend", many, source="flashinfer")
    hostile = kernel(HOSTILE, [[frame(30, "Layer.forward", HOSTILE_TEXT)]])
    sample = kernel("sample", [[frame(5, "Sampler.forward", "sample(p)", file="sglang/srt/layers/sampler.py")]])
    q_sites = [site(12, annotation="self.fused"), site(13, annotation="not (self.fused)")]
    gelu = node("gelu", "torch", sites=[site(25)], phases=["prefill"])
    layer = node(
        "layer",
        "container",
        node("q_proj", "op", sites=q_sites),
        node("attn", "op", sites=[site(20)], annotation="attn_forward_method == AttnForwardMethod.MLA"),
        node(
            "mlp",
            "container",
            gelu,
            function="MLP.forward",
            sites=[site(24)],
        ),
        node(HOSTILE, "op", sites=[site(30, annotation=HOSTILE_TEXT)], annotation=HOSTILE_TEXT),
        function="Layer.forward",
        sites=[site(90, "Model.forward")],
        annotation="for i in range(len(self.layers))",
    )
    draft = node("draft", "torch", sites=[site(95, "Model.forward")], phases=["prefill"])
    model = node("SmallForCausalLM", "container", layer, draft, function="Model.forward")
    ops = {
        **HEAD,
        "ops": [
            {
                "name": "q_proj",
                "call_sites": [site(12), site(13), site(44, "Draft.forward")],
                "kernels": [used(gemm, "quantization=fp8; or quantization=w8a8; or 1 more"), used(twin)],
            },
            {"name": "attn", "call_sites": [site(20)], "kernels": [used(attend, "attention_backend=flashinfer")]},
            {"name": HOSTILE, "call_sites": [site(30)], "kernels": [used(hostile, HOSTILE_TEXT)]},
        ],
        "graph": node("small", "container", model),
        "direct_kernels": [{**{k: gemm[k] for k in ("name", "source", "definition")}, "call_sites": [site(50)]}],
        "non_model_ops": [
            {
                "name": "sampler",
                "group": "sampling",
                "when": "after every forward",
                "call_sites": [site(5, "Sampler.forward", "sglang/srt/layers/sampler.py")],
                "kernels": [used(sample)],
            }
        ],
    }
    kernels = [gemm, twin, attend, hostile, sample]
    return valid(ops, made_up_traces.document(kernels, HEAD["sources"]))


def valid(ops, kernels):
    SCHEMAS["op_traces"].validate(ops)
    SCHEMAS["kernel_traces"].validate(packed(kernels))
    return ops, kernels


def definitions(kernels):
    names = [f"gemm_{n}" for n in range(6)] + [HOSTILE_TEXT]
    return {page.kernel_id(kernels["kernels"][0]): names}


@functools.cache
def large():
    """As large as a real trace: 250 kernels, 5000 chains of 14 frames that share their tails, 60 ops, 240 nodes."""
    tails = [[frame(100 * t + n, f"Class{t}.method{n}", f"self.part{n}(x)") for n in range(1, 13)] for t in range(90)]

    def chain(k, c):
        call = frame(k + 1, f"run_{k}", f"kernel_{k}({c})")
        return [call, frame(c + 1, f"Runner{k}.run", "self.launch()"), *tails[(7 * k + c) % 90]]

    kernels = [kernel(f"kernel_{k}", [chain(k, c) for c in range(20)], line=k + 1) for k in range(250)]
    condition = "; or ".join(f"quantization=fp8 and self.rank_{n} is not None" for n in range(4))
    ops = []
    for n in range(60):
        implementations = [used(kernels[n + k], condition) for k in range(12)]
        ops.append({"name": f"op_{n}", "call_sites": [site(n + 1)], "kernels": implementations})
    layers = []
    for n in range(40):
        children = [node(f"op_{(n + k) % 60}", "op", sites=[site(k + 1)]) for k in range(5)]
        layers.append(node(f"layer_{n}", "container", *children, function=f"Layer{n}.forward", sites=[site(n + 1)]))
    graph = node("large", "container", node("Large", "container", *layers, function="Large.forward"))
    trace = {**HEAD, "ops": ops, "graph": graph, "direct_kernels": [], "non_model_ops": []}
    return valid(trace, made_up_traces.document(kernels, HEAD["sources"]))


def rendered(make=documents):
    ops, kernels = make()
    return page.render(ops, kernels, definitions(kernels))
