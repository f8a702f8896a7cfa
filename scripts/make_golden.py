#!/usr/bin/env python3
"""Makes every file of tests/golden/: what PyTorch computes, for our tests to agree with.

    python3 scripts/make_golden.py [--out tests/golden] [--seed 1]

Needs torch, NumPy and transformers 5; half a minute.  golden_ops.py has the cases of ops; this
file holds the models: tiny LLaMAs and a tiny GPT-2 in plain PyTorch, each checked against
transformers, with their weights, a batch stream and 50 steps of AdamW in f32 and in f64.  The f64
curve is the truth: the f32 curve's distance from it, printed here, is what f32 itself costs.
The meaning of each entry stands in tests/golden/README.md.
"""
import argparse
import json
import math
import os
import struct

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402

import golden_ops  # noqa: E402

LLAMA = dict(blocks=2, width=48, heads=4, ffn=128, vocab=67, context=24, eps=1e-5, theta=1e4)
GPT2 = dict(blocks=2, width=48, heads=4, ffn=192, vocab=67, context=24, eps=1e-5)
TRAIN = dict(steps=50, batch=8, betas=(0.9, 0.95), adam_eps=1e-8, decay=0.1, clip=1.0,
             peak=1e-3, warmup=5, floor=0.1)
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32"}


def save(path, entries, metadata):
    """safetensors, written here so that a second run gives the same bytes (metadata in order)."""
    header, offset = {"__metadata__": metadata}, 0
    order = sorted(entries, key=lambda k: (-entries[k].element_size(), k))
    for key in order:
        t, end = entries[key], offset + entries[key].nbytes
        header[key] = dict(dtype=DTYPES[t.dtype], shape=list(t.shape), data_offsets=[offset, end])
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key in order:
            file.write(entries[key].contiguous().numpy().tobytes())
    print(f"{path}: {len(entries)} entries, {8 + len(text) + offset} bytes")


def llama_logits(w, tokens, c):
    """Logits [B,T,V] of a LLaMA with the weights w under Hugging Face's names."""
    x = F.embedding(tokens, w["model.embed_tokens.weight"])
    angle = golden_ops.rope_lines(tokens.shape[1], c["width"] // c["heads"], c["theta"])
    for n in range(c["blocks"]):
        p = f"model.layers.{n}."
        h = F.rms_norm(x, (c["width"],), w[p + "input_layernorm.weight"], c["eps"])
        q, k, v = (F.linear(h, w[f"{p}self_attn.{name}_proj.weight"]) for name in "qkv")
        q, k = (golden_ops.rotate(t.unflatten(2, (heads, -1)), angle).flatten(2)
                for t, heads in ((q, c["heads"]), (k, c["kv_heads"])))
        h = golden_ops.attend(q, k, v, c["heads"], c["kv_heads"], causal=True)[0]
        x = x + F.linear(h, w[p + "self_attn.o_proj.weight"])
        h = F.rms_norm(x, (c["width"],), w[p + "post_attention_layernorm.weight"], c["eps"])
        gate, up = (F.linear(h, w[f"{p}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[p + "mlp.down_proj.weight"])
    x = F.rms_norm(x, (c["width"],), w["model.norm.weight"], c["eps"])
    return F.linear(x, w["model.embed_tokens.weight" if c["tied"] else "lm_head.weight"])


def llama_weights(c, random):
    """Larger than one trains with, and norms away from 1, so that every part shows in the loss."""
    D, C = c["width"], c["width"] // c["heads"] * c["kv_heads"]
    shapes = {"model.embed_tokens.weight": (c["vocab"], D), "model.norm.weight": (D,)}
    for n in range(c["blocks"]):
        p = f"model.layers.{n}."
        shapes |= {p + "input_layernorm.weight": (D,), p + "post_attention_layernorm.weight": (D,),
                   p + "self_attn.q_proj.weight": (D, D), p + "self_attn.k_proj.weight": (C, D),
                   p + "self_attn.v_proj.weight": (C, D), p + "self_attn.o_proj.weight": (D, D),
                   p + "mlp.gate_proj.weight": (c["ffn"], D),
                   p + "mlp.up_proj.weight": (c["ffn"], D),
                   p + "mlp.down_proj.weight": (D, c["ffn"])}
    if not c["tied"]:
        shapes["lm_head.weight"] = (c["vocab"], D)
    return {name: torch.randn(dims, generator=random) * 0.1 + (1.0 if len(dims) == 1 else 0.0)
            for name, dims in shapes.items()}


def llama_peer(c):
    config = transformers.LlamaConfig(
        vocab_size=c["vocab"], hidden_size=c["width"], intermediate_size=c["ffn"],
        num_hidden_layers=c["blocks"], num_attention_heads=c["heads"],
        num_key_value_heads=c["kv_heads"], max_position_embeddings=c["context"],
        rms_norm_eps=c["eps"], tie_word_embeddings=c["tied"],
        rope_parameters=dict(rope_type="default", rope_theta=c["theta"]))
    return transformers.LlamaForCausalLM(config)


def gpt2_logits(w, tokens, c):
    """Logits [B,T,V] of a GPT-2 with tied head; matrices are [in,out], as Conv1D keeps them."""
    def conv(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def norm(x, name):
        return F.layer_norm(x, (c["width"],), w[name + ".weight"], w[name + ".bias"], c["eps"])
    x = F.embedding(tokens, w["wte.weight"]) + w["wpe.weight"][:tokens.shape[1]]
    for n in range(c["blocks"]):
        q, k, v = conv(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn").chunk(3, dim=-1)
        h = golden_ops.attend(q, k, v, c["heads"], c["heads"], causal=True)[0]
        x = x + conv(h, f"h.{n}.attn.c_proj")
        h = F.gelu(conv(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc"), approximate="tanh")
        x = x + conv(h, f"h.{n}.mlp.c_proj")
    return F.linear(norm(x, "ln_f"), w["wte.weight"])


def gpt2_weights(c, random):
    D = c["width"]
    shapes = {"wte.weight": (c["vocab"], D), "wpe.weight": (c["context"], D)}
    pairs = {"ln_f": (D,)}
    for n in range(c["blocks"]):
        pairs |= {f"h.{n}.ln_1": (D,), f"h.{n}.ln_2": (D,), f"h.{n}.attn.c_attn": (D, 3 * D),
                  f"h.{n}.attn.c_proj": (D, D), f"h.{n}.mlp.c_fc": (D, c["ffn"]),
                  f"h.{n}.mlp.c_proj": (c["ffn"], D)}
    for name, dims in pairs.items():
        shapes |= {name + ".weight": dims, name + ".bias": dims[-1:]}
    return {name: torch.randn(dims, generator=random) * 0.1
            + (1.0 if len(dims) == 1 and name.endswith("weight") else 0.0)
            for name, dims in shapes.items()}


def gpt2_peer(c):
    config = transformers.GPT2Config(
        vocab_size=c["vocab"], n_positions=c["context"], n_embd=c["width"], n_layer=c["blocks"],
        n_head=c["heads"], n_inner=c["ffn"], activation_function="gelu_new",
        layer_norm_epsilon=c["eps"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None)
    return transformers.GPT2LMHeadModel(config)


def check_peer(peer, weights, tokens, logits, prefix=""):
    """Their logits from our weights; returns the error's norm over the norm."""
    _, odd = peer.load_state_dict({prefix + k: t for k, t in weights.items()}, strict=False)
    assert not odd, odd
    peer.tie_weights()
    loaded = dict(peer.named_parameters())
    assert len(loaded) == len(weights)
    assert all(torch.equal(loaded[prefix + k], t) for k, t in weights.items())
    with torch.no_grad():
        theirs = peer.eval()(tokens.long()).logits
    away = distance(theirs, logits)
    assert away < 1e-6, away
    return away


def stream(c, seed):
    """Tokens [steps,B,T+1] of a Markov chain: each symbol has four followers of unequal odds."""
    random = numpy.random.RandomState(seed)  # its numbers are frozen across NumPy versions
    followers = random.randint(c["vocab"], size=(c["vocab"], 4))
    rows = TRAIN["steps"] * TRAIN["batch"]
    out = numpy.empty((rows, c["context"] + 1), dtype=numpy.int32)
    out[:, 0] = random.randint(c["vocab"], size=rows)
    for t in range(c["context"]):
        choice = numpy.searchsorted([0.6, 0.85, 0.95], random.random_sample(rows))
        out[:, t + 1] = followers[out[:, t], choice]
    return torch.from_numpy(out.reshape(TRAIN["steps"], TRAIN["batch"], -1))


def rate(step):
    """Learning rate of a 1-based step: linear warm-up, then a cosine down to floor * peak."""
    peak, warmup, low = TRAIN["peak"], TRAIN["warmup"], TRAIN["floor"] * TRAIN["peak"]
    if step <= warmup:
        return peak * step / warmup
    turn = math.pi * (step - warmup) / (TRAIN["steps"] - warmup)
    return low + (peak - low) * 0.5 * (1 + math.cos(turn))


def train(logits_of, weights, batches, c, dtype):
    """-> logits and gradients of the first batch, losses and norms before clipping [steps]."""
    w = {k: torch.nn.Parameter(t.to(dtype, copy=True)) for k, t in weights.items()}
    groups = [dict(params=[p for p in w.values() if p.dim() >= 2], weight_decay=TRAIN["decay"]),
              dict(params=[p for p in w.values() if p.dim() < 2], weight_decay=0.0)]
    optim = torch.optim.AdamW(groups, lr=0.0, betas=TRAIN["betas"], eps=TRAIN["adam_eps"],
                              foreach=False)
    first, losses, norms = None, [], []
    for s, batch in enumerate(batches, start=1):
        logits = logits_of(w, batch[:, :-1], c)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().long())
        optim.zero_grad()
        loss.backward()
        if first is None:
            first = logits.detach(), {k: p.grad.clone() for k, p in w.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(w.values(), TRAIN["clip"]).item())
        losses.append(loss.item())
        for group in optim.param_groups:
            group["lr"] = rate(s)
        optim.step()
    return *first, *torch.tensor((losses, norms), dtype=torch.float64)


def model_file(name, kind, c, options, full_gradients):
    logits_of, weights_of, peer_of, prefix = {
        "llama": (llama_logits, llama_weights, llama_peer, ""),
        "gpt2": (gpt2_logits, gpt2_weights, gpt2_peer, "transformer."),
    }[kind]
    weights = weights_of(c, torch.Generator().manual_seed(options.seed))
    batches = stream(c, options.seed)
    logits, grads, losses, norms = train(logits_of, weights, batches, c, torch.float32)
    logits64, grads64, losses64, norms64 = train(logits_of, weights, batches, c, torch.float64)
    away = check_peer(peer_of(c), weights, batches[0][:, :-1], logits, prefix)
    entries = {"weight." + k: t for k, t in weights.items()}
    entries |= {"tokens": batches, "logits": logits, "losses": losses, "norms": norms,
                "losses.f64": losses64, "norms.f64": norms64,
                "rates": torch.tensor([rate(s + 1) for s in range(TRAIN["steps"])],
                                      dtype=torch.float64),
                "grad_norms.f64": torch.stack([g.norm() for g in grads64.values()])}
    if full_gradients:
        entries |= {"grad." + k: g.float() for k, g in grads64.items()}
    save(os.path.join(options.out, name + ".safetensors"), entries, common(options) | {
        "transformers": transformers.__version__, "model": kind, "config": json.dumps(c),
        "train": json.dumps(TRAIN), "grad_norms": json.dumps(list(grads64))})
    print(f"  logits: {away:.1e} from transformers, f32 {distance(logits, logits64):.1e} from f64;"
          f" loss {losses64[0]:.4f} to {losses64[-1]:.4f}; f32 curve at most"
          f" {((losses - losses64) / losses64).abs().max():.1e} from f64,"
          f" norms {((norms - norms64) / norms64).abs().max():.1e}")


def distance(a, b):
    """The error's norm over the norm of the reference."""
    return ((a.double() - b).norm() / b.norm()).item()


def common(options):
    return {"torch": torch.__version__, "seed": str(options.seed),
            "command": f"python3 scripts/make_golden.py --seed {options.seed}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.path.join("tests", "golden"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    torch.set_num_threads(1)
    book = golden_ops.cases(options.seed)
    save(os.path.join(options.out, "ops.safetensors"), book.entries,
         common(options) | {"cases": json.dumps(book.cases, separators=(",", ":"))})
    for name, kv_heads, tied in (("mha", 4, False), ("gqa", 2, False), ("tied", 4, True),
                                 ("gqa_tied", 2, True)):
        model_file("llama_" + name, "llama", LLAMA | dict(kv_heads=kv_heads, tied=tied), options,
                   full_gradients=name == "gqa")
    model_file("gpt2_tiny", "gpt2", GPT2 | dict(tied=True), options, full_gradients=True)


if __name__ == "__main__":
    main()
