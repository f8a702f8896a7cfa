#!/usr/bin/env python3
"""A training step of LLaMA or GPT-2 on the CPU in PyTorch eager, fp32: the peer of cpu_llama.lua.

    python3 tests/bench/torch_cpu_llama.py --shape llama --threads 2 --steps 10 --warmup 3

Prints one JSON line: the median seconds of a step and tokens/s.  A step is forward, loss, backward,
clipping to norm 1 and AdamW (decay 0.1 on matrices), on random tokens.  The peer is given what is
fastest in eager mode: fused q-k-v and gate-up products, scaled_dot_product_attention, the fused
cross entropy, and whichever of the fused and the foreach AdamW is faster here (--adamw auto).
"""
import argparse
import json
import os
import statistics
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--adamw", choices=("auto", "fused", "foreach"), default="auto")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if min(options.threads, options.steps) < 1 or options.warmup < 0:
        parser.error("--threads and --steps are at least 1, --warmup at least 0")
    return options


# The same two shapes stand in cpu_llama.lua.
SHAPES = {
    "llama": dict(blocks=4, width=256, heads=8, ffn=688, vocab=259, context=256, batch=16),
    "gpt2": dict(blocks=12, width=768, heads=12, ffn=3072, vocab=50257, context=64, batch=4),
}

if __name__ == "__main__":
    OPTIONS = arguments()
    # Read by the OpenMP library when torch is loaded, so set before the import.
    os.environ["OMP_NUM_THREADS"] = str(OPTIONS.threads)

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402


def attention(qkv_BTC, heads, rope=None):
    """Causal attention from packed q, k, v [B,T,3*D]; rope is (cos, sin) [T,K] or None."""
    B, T, C = qkv_BTC.shape
    q, k, v = qkv_BTC.view(B, T, 3, heads, C // (3 * heads)).permute(2, 0, 3, 1, 4)
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(B, T, C // 3)


def rotate(x, cos, sin):
    """Half-split rotary positions, as Hugging Face lays them out."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads = s["heads"]
        self.norm1 = nn.RMSNorm(s["width"], eps=1e-5)
        self.qkv = nn.Linear(s["width"], 3 * s["width"], bias=False)
        self.out = nn.Linear(s["width"], s["width"], bias=False)
        self.norm2 = nn.RMSNorm(s["width"], eps=1e-5)
        self.gate_up = nn.Linear(s["width"], 2 * s["ffn"], bias=False)
        self.down = nn.Linear(s["ffn"], s["width"], bias=False)

    def forward(self, x, rope):
        x = x + self.out(attention(self.qkv(self.norm1(x)), self.heads, rope))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.embed = nn.Embedding(s["vocab"], s["width"])
        self.blocks = nn.ModuleList(LlamaBlock(s) for _ in range(s["blocks"]))
        self.norm = nn.RMSNorm(s["width"], eps=1e-5)
        self.head = nn.Linear(s["width"], s["vocab"], bias=False)
        half = s["width"] // s["heads"] // 2
        angle = torch.outer(torch.arange(s["context"]), 10000.0 ** (-torch.arange(half) / half))
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        start(self, s["blocks"])

    def forward(self, tokens):
        T = tokens.shape[1]
        x, rope = self.embed(tokens), (self.cos[:T], self.sin[:T])
        for block in self.blocks:
            x = block(x, rope)
        return self.head(self.norm(x))


class GPT2Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads = s["heads"]
        self.norm1 = nn.LayerNorm(s["width"])
        self.qkv = nn.Linear(s["width"], 3 * s["width"])
        self.out = nn.Linear(s["width"], s["width"])
        self.norm2 = nn.LayerNorm(s["width"])
        self.up = nn.Linear(s["width"], s["ffn"])
        self.down = nn.Linear(s["ffn"], s["width"])

    def forward(self, x):
        x = x + self.out(attention(self.qkv(self.norm1(x)), self.heads))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.embed = nn.Embedding(s["vocab"], s["width"])
        self.positions = nn.Embedding(s["context"], s["width"])
        self.blocks = nn.ModuleList(GPT2Block(s) for _ in range(s["blocks"]))
        self.norm = nn.LayerNorm(s["width"])
        start(self, s["blocks"])

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def start(model, blocks, std=0.02):
    """N(0, std) for matrices, less by sqrt(2 * blocks) where a branch ends; biases 0."""
    for name, p in model.named_parameters():
        if p.dim() == 2:
            ends = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(p, 0.0, std / (2 * blocks) ** 0.5 if ends else std)
        elif name.endswith("bias"):
            nn.init.zeros_(p)


def optimiser(model, kind, rate=1e-3):
    groups = [
        dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=0.1),
        dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, **{kind: True})


def train_step(model, optim, tokens, targets):
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad(set_to_none=True)
    return loss.item()


def faster_adamw(model):
    """Time three steps of each form on made-up gradients, with rate 0 so that nothing moves."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    seconds = {}
    for kind in ("fused", "foreach"):
        optim = optimiser(model, kind, rate=0.0)
        optim.step()
        began = time.perf_counter()
        for _ in range(3):
            optim.step()
        seconds[kind] = time.perf_counter() - began
    for p in model.parameters():
        p.grad = None
    return min(seconds, key=seconds.get)


def main():
    torch.set_num_threads(OPTIONS.threads)
    torch.manual_seed(OPTIONS.seed)
    s = SHAPES[OPTIONS.shape]
    model = (Llama if OPTIONS.shape == "llama" else GPT2)(s)
    kind = faster_adamw(model) if OPTIONS.adamw == "auto" else OPTIONS.adamw
    optim = optimiser(model, kind)
    seconds = []
    for _ in range(OPTIONS.warmup + OPTIONS.steps):
        tokens = torch.randint(s["vocab"], (s["batch"], s["context"] + 1))
        began = time.perf_counter()
        loss = train_step(model, optim, tokens[:, :-1], tokens[:, 1:])
        seconds.append(time.perf_counter() - began)
    middle = statistics.median(seconds[OPTIONS.warmup:])
    print(json.dumps({
        "name": "torch " + torch.__version__, "shape": OPTIONS.shape, "threads": OPTIONS.threads,
        "parameters": sum(p.numel() for p in model.parameters()), "adamw": kind,
        "steps": OPTIONS.steps, "seconds": middle, "loss": loss,
        "tokens_per_s": s["batch"] * s["context"] / middle,
    }))
    return 0


if __name__ == "__main__":
    sys.exit(main())
