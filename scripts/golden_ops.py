"""The cases of tests/golden/ops.safetensors: every op of runtime/pg.h, as PyTorch computes it.

make_golden.py calls cases() and writes the file.  A case is a function of named inputs; `Book.add`
runs it twice, in f32 and from the same f32 numbers in f64, and takes gradients of the first output
for a random upstream gradient.  Sizes are small and odd, so that no lane count divides them.
"""
import math

import torch
import torch.nn.functional as F

IGNORE = -100


class Book:
    """Entries by name, and the table of cases that a test walks."""

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.entries, self.cases = {}, []

    def normal(self, *dims, std=1.0):
        return torch.randn(*dims, generator=self.random) * std

    def apart(self, *dims):
        """Distinct values at least 0.05 from each other and from 0: no ties, no kink at 0."""
        count = math.prod(dims)
        order = torch.randperm(count, generator=self.random)
        return ((order - count // 2).float() * 0.1 + 0.05).reshape(dims)

    def integers(self, high, *dims):
        return torch.randint(high, dims, generator=self.random, dtype=torch.int32)

    def add(self, name, op, function, inputs, outputs=("y",), frozen=(), **attributes):
        """Record function(*inputs) -> output or tuple; inputs maps names to tensors.

        Gradients go to each floating input not in `frozen`."""
        wanted = [k for k, t in inputs.items() if t.is_floating_point() and k not in frozen]
        for key, t in inputs.items():
            self.entries[f"{name}.{key}"] = t
        upstream = None
        for dtype, suffix in ((torch.float32, ""), (torch.float64, ".f64")):
            given = {k: t.to(dtype, copy=True) if t.is_floating_point() else t
                     for k, t in inputs.items()}
            leaves = [given[k].requires_grad_() for k in wanted]
            results = function(*given.values())
            results = results if isinstance(results, tuple) else (results,)
            for key, t in zip(outputs, results, strict=True):
                if not suffix or t.is_floating_point():
                    self.entries[f"{name}.{key}{suffix}"] = t.detach()
            if not wanted:
                continue
            if upstream is None:
                upstream = self.normal(*results[0].shape)
                self.entries[f"{name}.d{outputs[0]}"] = upstream
            grads = torch.autograd.grad(results[0], leaves, upstream.to(dtype))
            for key, t in zip(wanted, grads):
                self.entries[f"{name}.d{key}{suffix}"] = t
        self.cases.append(dict(name=name, op=op, attributes=attributes, inputs=list(inputs),
                               outputs=list(outputs), gradients=wanted))


def cases(seed):
    book = Book(seed)
    for section in (elementwise, matmul, norms, positions, attention, softmax, tokens, reductions,
                    rearranging, clipping, adamw, sgd):
        section(book)
    return book


def elementwise(book):
    functions = {
        "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "tanh": torch.tanh,
        "sigmoid": torch.sigmoid, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
        "square": torch.square, "neg": torch.neg, "abs": torch.abs,
    }
    far = torch.tensor([[-40.0, -9.0, -1e-3, 1e-3, 3.0, 9.0, 40.0]])
    for kind, function in functions.items():
        x = book.normal(5, 7)
        if kind in ("log", "sqrt"):
            x = x.abs() + 0.1
        elif kind != "exp":
            x = torch.cat((x, far))  # saturated ends
        book.add(f"unary.{kind}", "unary", function, {"x": x}, kind=kind)
    functions = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
                 "max": torch.maximum, "min": torch.minimum}
    shapes = {"same": (2, 3, 5), "suffix2": (3, 5), "suffix1": (5,), "one": (1,)}
    for kind, function in functions.items():
        for label, dims in shapes.items():
            a, b = book.normal(2, 3, 5), book.normal(*dims)
            if kind == "div":
                b = b.sign() * (b.abs() + 0.3)
            book.add(f"binary.{kind}.{label}", "binary", function, {"a": a, "b": b}, kind=kind)
    book.add("axpby", "axpby", lambda x, y: 0.7 * x - 1.3 * y,
             {"x": book.normal(3, 7), "before": book.normal(3, 7)}, alpha=0.7, beta=-1.3)


def matmul(book):
    M, K, N = 5, 7, 3
    for label, lead in (("flat", ()), ("batched", (2, 3))):
        for ta in (0, 1):
            for tb in (0, 1):
                a = book.normal(*lead, *((K, M) if ta else (M, K)))
                b = book.normal(*lead, *((N, K) if tb else (K, N)))
                book.add(f"matmul.{label}.{ta}{tb}", "matmul",
                         lambda a, b, ta=ta, tb=tb: (a.mT if ta else a) @ (b.mT if tb else b),
                         {"a": a, "b": b}, transpose_a=ta, transpose_b=tb)
    for tb in (0, 1):  # the leading dims of a fold into M
        book.add(f"matmul.fold.0{tb}", "matmul", lambda a, b, tb=tb: a @ (b.mT if tb else b),
                 {"a": book.normal(2, 4, K), "b": book.normal(*((N, K) if tb else (K, N)))},
                 transpose_a=0, transpose_b=tb)
    # a weight gradient: the leading dims fold into the sum
    book.add("matmul.sum.10", "matmul", lambda a, b: a.flatten(0, 1).mT @ b.flatten(0, 1),
             {"a": book.normal(2, 4, K), "b": book.normal(2, 4, N)}, transpose_a=1, transpose_b=0)
    book.add("matmul.scaled", "matmul", lambda a, b, out: 0.5 * (a @ b) + 0.25 * out,
             {"a": book.normal(M, K), "b": book.normal(K, N), "before": book.normal(M, N)},
             transpose_a=0, transpose_b=0, alpha=0.5, beta=0.25)
    ends = {"none": lambda x: x, "gelu": F.gelu,
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    for kind, end in ends.items():
        def linear(a, b, bias, end=end):
            inner = a @ b.mT + bias
            return end(inner), inner
        book.add(f"matmul.bias.{kind}", "matmul", linear,
                 {"a": book.normal(2, 4, K), "b": book.normal(N, K), "bias": book.normal(N)},
                 ("y", "aux"), transpose_a=0, transpose_b=1, epilogue=kind)


def uneven_rows(book, *dims):
    """Rows of very different size: in the smallest, eps is what keeps the norm finite."""
    x = book.normal(*dims)
    x[0, 0] *= 1e-3
    x[0, 1] *= 100.0
    return x


def norms(book):
    def rms(x, w=None, eps=1e-5):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * rstd if w is None else x * rstd * w, rstd.flatten()

    def layer(x, w, b, eps=1e-5):
        rstd = torch.rsqrt(x.var(-1, correction=0) + eps).flatten()
        return F.layer_norm(x, x.shape[-1:], w, b, eps), x.mean(-1).flatten(), rstd

    for D in (13, 64):
        x, w, b = uneven_rows(book, 3, 4, D), 1 + book.normal(D, std=0.3), book.normal(D)
        assert torch.allclose(rms(x, w)[0], F.rms_norm(x, (D,), w, 1e-5), rtol=1e-5, atol=1e-6)
        book.add(f"rmsnorm.{D}", "rmsnorm", rms, {"x": x, "w": w}, ("y", "rstd"), eps=1e-5)
        book.add(f"layernorm.{D}", "layernorm", layer, {"x": x + 0.5, "w": w, "b": b},
                 ("y", "mean", "rstd"), eps=1e-5)
    book.add("rmsnorm.plain", "rmsnorm", rms, {"x": uneven_rows(book, 3, 2, 9)}, ("y", "rstd"),
             eps=1e-5)


def rope_lines(T, K, theta, first=0):
    """angle(t,i) = (first + t) theta^(-2i/K), in double: [T,K/2]."""
    inverse = theta ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    return torch.outer(torch.arange(first, first + T, dtype=torch.float64), inverse)


def rotate(x_BTHK, angle_TK2):
    """Hugging Face's form: x cos + rotate_half(x) sin, each line of the table twice."""
    angle = torch.cat((angle_TK2, angle_TK2), dim=-1)[:, None, :]
    low, high = x_BTHK.chunk(2, dim=-1)
    half = torch.cat((-high, low), dim=-1)
    return x_BTHK * angle.cos().to(x_BTHK.dtype) + half * angle.sin().to(x_BTHK.dtype)


def positions(book):
    for label, theta, first in (("plain", 10000.0, 0), ("later", 500000.0, 1000)):
        angle = rope_lines(7, 10, theta, first)
        name = f"rope_table.{label}"
        for key, t in (("cos", angle.cos()), ("sin", angle.sin())):
            book.entries[f"{name}.{key}"] = t.float()
            book.entries[f"{name}.{key}.f64"] = t
        book.cases.append(dict(name=name, op="rope_table", inputs=[], outputs=["cos", "sin"],
                               gradients=[], attributes=dict(theta=theta, first=first)))
    B, T, K = 2, 5, 6
    for label, columns, heads, start in (("all", 4, 4, 0), ("packed", 5, 3, 0), ("late", 3, 3, 9)):
        def rope(x, columns=columns, heads=heads, start=start):
            x = x.view(B, T, columns, K)
            turned = rotate(x[:, :, :heads], rope_lines(T, K, 10000.0, start))
            return torch.cat((turned, x[:, :, heads:]), dim=2).flatten(2)
        book.add(f"rope.{label}", "rope", rope, {"x": book.normal(B, T, columns * K)}, heads=heads,
                 start=start, theta=10000.0, head_width=K)


def attend(q, k, v, H, G, causal, lengths=None, scale=None):
    """q [B,T,H*K], k and v [B,Tk,G*K] -> out [B,T,H*K], lse [B,H,T]; a row with no key gives 0."""
    B, T, Tk = q.shape[0], q.shape[1], k.shape[1]
    q, k, v = (t.unflatten(2, (n, -1)).transpose(1, 2) for t, n in ((q, H), (k, G), (v, G)))
    k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    seen = torch.ones(B, 1, T, Tk, dtype=torch.bool)
    if causal:
        seen = seen & torch.ones(T, Tk, dtype=torch.bool).tril(Tk - T)
    if lengths is not None:
        seen = seen & (torch.arange(Tk) < lengths[:, None])[:, None, None, :]
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(~some, 0.0)
    p = scores.softmax(-1).masked_fill(~some, 0.0)
    return (p @ v).transpose(1, 2).flatten(2), scores.logsumexp(-1)


def attention(book):
    B, K = 2, 6
    # name, H, G, T, Tk, causal, lengths, scale
    table = (
        ("causal", 3, 3, 7, 7, 1, None, 0), ("full", 3, 3, 7, 7, 0, None, 0),
        ("grouped", 4, 2, 7, 7, 1, None, 0), ("one_key_head", 4, 1, 5, 5, 1, None, 0),
        ("scaled", 2, 2, 5, 5, 1, None, 0.3), ("few_rows", 4, 2, 3, 9, 1, None, 0),
        ("cross", 2, 2, 4, 9, 0, None, 0), ("lengths", 4, 2, 7, 7, 0, (4, 7), 0),
        ("lengths_causal", 2, 2, 7, 7, 1, (3, 6), 0), ("no_key", 2, 1, 5, 5, 0, (0, 5), 0),
        ("long", 2, 2, 67, 67, 1, None, 0),
    )
    for label, H, G, T, Tk, causal, lengths, scale in table:
        inputs = {"q": book.normal(B, T, H * K), "k": book.normal(B, Tk, G * K),
                  "v": book.normal(B, Tk, G * K)}
        if lengths:
            inputs["lengths"] = torch.tensor(lengths, dtype=torch.int32)
        # lse of a row that sees no key has no meaning, so that case does not keep it
        outputs = ("y",) if lengths and 0 in lengths else ("y", "lse")

        def run(q, k, v, lengths=None, H=H, G=G, causal=causal, scale=scale, kept=len(outputs)):
            return attend(q, k, v, H, G, causal, lengths, scale)[:kept]
        book.add(f"attention.{label}", "attention", run, inputs, outputs, heads=H, kv_heads=G,
                 causal=causal, scale=scale)
    H, G, T = 4, 2, 7

    def packed(qkv):
        return attend(*qkv.split((H * K, G * K, G * K), dim=2), H, G, True)
    book.add("attention.packed", "attention", packed, {"q": book.normal(B, T, (H + 2 * G) * K)},
             ("y", "lse"), heads=H, kv_heads=G, causal=1, scale=0)
    check_attention(book)


def check_attention(book):
    """The formula above against PyTorch's own kernel."""
    q, k, v = (book.normal(2, 7, n * 6) for n in (4, 2, 2))
    heads = [t.unflatten(2, (-1, 6)).transpose(1, 2) for t in (q, k, v)]
    theirs = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    ours = attend(q, k, v, 4, 2, True)[0]
    assert torch.allclose(ours, theirs.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-6)


def softmax(book):
    x = book.normal(4, 11, std=2.0)
    x[1] += 1000.0  # overflows exp unless the maximum is taken off
    x[2, 3] = -1e4
    book.add("softmax", "softmax", lambda x: x.softmax(-1), {"x": x}, log=0)
    book.add("log_softmax", "softmax", lambda x: x.log_softmax(-1), {"x": x}, log=1)

    def swiglu(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    book.add("swiglu", "swiglu", swiglu, {"x": book.normal(3, 2, 26, std=3.0)})
    x = book.apart(5, 9)
    x[1, 2] = x[1, 6] = 99.0  # first of equals
    ids = torch.tensor(x.numpy().argmax(-1), dtype=torch.int32)  # NumPy promises the first
    book.add("argmax", "argmax", lambda x: ids, {"x": x}, ("ids",), frozen=("x",))


def tokens(book):
    ids = torch.tensor([[3, 0, 6, 3], [3, 5, 0, 6]], dtype=torch.int32)  # repeats add up
    book.add("embedding", "embedding", lambda table, ids: F.embedding(ids, table),
             {"table": book.normal(7, 5), "ids": ids})

    def loss(reduction):
        def function(x, targets):
            rows = F.cross_entropy(x, targets.long(), reduction="none", ignore_index=IGNORE)
            lse, valid = x.logsumexp(-1), (targets != IGNORE).sum()
            if reduction == "rows":
                return rows, lse
            total = rows.sum() if reduction == "sum" else rows.sum() / valid
            theirs = F.cross_entropy(x, targets.long(), reduction=reduction, ignore_index=IGNORE)
            assert valid == 0 or torch.allclose(total, theirs, rtol=1e-5)
            return total.reshape(1), lse, rows
        return function
    x = book.normal(6, 11, std=2.0)
    x[4, 2] = 1000.0
    some = torch.tensor([3, IGNORE, 10, 0, 2, IGNORE], dtype=torch.int32)
    every, none = book.integers(11, 6), torch.full((6,), IGNORE, dtype=torch.int32)
    for label, targets in (("some", some), ("every", every)):
        book.add(f"cross_entropy.mean.{label}", "cross_entropy", loss("mean"),
                 {"x": x, "targets": targets}, ("y", "lse", "rows"), ignore=IGNORE,
                 reduction="mean")
    for label, targets in (("some", some), ("none", none)):
        book.add(f"cross_entropy.sum.{label}", "cross_entropy", loss("sum"),
                 {"x": x, "targets": targets}, ("y", "lse", "rows"), ignore=IGNORE, reduction="sum")
    book.add("cross_entropy.rows", "cross_entropy", loss("rows"), {"x": x, "targets": some},
             ("y", "lse"), ignore=IGNORE, reduction="rows")


def reductions(book):
    functions = {"sum": torch.sum, "mean": torch.mean, "max": lambda x, dim: x.max(dim).values,
                 "min": lambda x, dim: x.min(dim).values}
    for kind, function in functions.items():
        for dim in (-1, 0, 1, 2):
            def reduce(x, function=function, dim=dim):
                return function(x.flatten(), 0).reshape(1) if dim < 0 else function(x, dim)
            x = book.apart(3, 4, 5) if kind in ("max", "min") else book.normal(3, 4, 5)
            label = "all" if dim < 0 else str(dim)
            book.add(f"reduce.{kind}.{label}", "reduce", reduce, {"x": x}, kind=kind, dim=dim)
    # Equal elements: the whole gradient goes to the first.
    x = torch.tensor([[1.0, 4.0, 4.0, 2.0], [-3.0, -3.0, 5.0, 5.0]])
    for kind in ("max", "min"):
        book.add(f"reduce.{kind}.equal", "reduce", lambda x, f=functions[kind]: f(x, 1), {"x": x},
                 kind=kind, dim=1)


def rearranging(book):
    for dim, start, count in ((0, 1, 2), (1, 0, 3), (2, 2, 3)):
        book.add(f"slice.{dim}", "slice",
                 lambda x, d=dim, s=start, n=count: x.narrow(d, s, n).contiguous(),
                 {"x": book.normal(3, 4, 5)}, dim=dim, start=start, count=count)
        dims = [[3, 4, 5], [3, 4, 5]]
        dims[1][dim] = 2
        book.add(f"concat.{dim}", "concat", lambda a, b, d=dim: torch.cat((a, b), d),
                 {"a": book.normal(*dims[0]), "b": book.normal(*dims[1])}, dim=dim)
    for order in ((1, 0), (2, 0, 1), (0, 2, 1), (2, 1, 0), (0, 2, 1, 3), (3, 1, 0, 2)):
        x = book.normal(*(2, 3, 4, 5)[:len(order)])
        book.add("permute." + "".join(map(str, order)), "permute",
                 lambda x, order=order: x.permute(order).contiguous(), {"x": x}, order=order)


def clipping(book):
    """torch divides by norm + 1e-6, pg_clip by norm: 1e-6 relative apart at most here."""
    def clip(a, b, limit):
        leaves = [torch.nn.Parameter(torch.zeros_like(t)) for t in (a, b)]
        for leaf, t in zip(leaves, (a, b)):
            leaf.grad = t.clone()
        norm = torch.nn.utils.clip_grad_norm_(leaves, limit)
        return norm.reshape(1), leaves[0].grad, leaves[1].grad
    for label, limit in (("above", 1.0), ("below", 100.0)):
        book.add(f"clip.{label}", "clip", lambda a, b, limit=limit: clip(a, b, limit),
                 {"a": book.normal(3, 5), "b": book.normal(7)}, ("norm", "ya", "yb"),
                 frozen=("a", "b"), max_norm=limit)


RATES = (0.01, 0.02, 0.03, 0.02, 0.005)  # one a step, as a schedule gives them


def steps(make, moments):
    """Five updates of a and b; gradients ga, gb [5,...].  -> values after each step, then state."""
    def run(a, b, ga, gb):
        leaves = [torch.nn.Parameter(t.detach().clone()) for t in (a, b)]
        optim, values = make(leaves), [[], []]
        for s, rate in enumerate(RATES):
            for group in optim.param_groups:
                group["lr"] = rate
            for leaf, g, kept in zip(leaves, (ga, gb), values):
                leaf.grad = g[s].clone()
            optim.step()
            for leaf, kept in zip(leaves, values):
                kept.append(leaf.detach().clone())
        state = [optim.state[leaf][key] for key in moments for leaf in leaves]
        return (torch.stack(values[0]), torch.stack(values[1]), *state)
    return run


def update(book, name, op, make, moments, **attributes):
    keys = ("a", "b", "ga", "gb")
    dims = ((3, 5), (7,), (len(RATES), 3, 5), (len(RATES), 7))
    inputs = {k: book.normal(*d) for k, d in zip(keys, dims)}
    outputs = ("ya", "yb", *(f"{m}{k}" for m in moments.values() for k in "ab"))
    book.add(name, op, steps(make, moments), inputs, outputs, frozen=keys, rates=RATES,
             **attributes)


def adamw(book):
    for label, decay, betas, eps in (("plain", (0.0, 0.0), (0.9, 0.999), 1e-8),
                                     ("groups", (0.1, 0.0), (0.9, 0.95), 1e-8),
                                     ("large_eps", (0.5, 0.1), (0.8, 0.9), 1e-2)):
        def make(leaves, decay=decay, betas=betas, eps=eps):
            groups = [dict(params=[p], weight_decay=d) for p, d in zip(leaves, decay)]
            return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=eps, foreach=False)
        update(book, f"adamw.{label}", "adamw", make, {"exp_avg": "m", "exp_avg_sq": "v"},
               decay=decay, betas=betas, eps=eps)


def sgd(book):
    for label, decay, momentum, dampening, nesterov in (
            ("plain", (0.0, 0.0), 0.0, 0.0, 0), ("decay", (0.1, 0.0), 0.0, 0.0, 0),
            ("momentum", (0.0, 0.0), 0.9, 0.0, 0), ("dampening", (0.1, 0.0), 0.9, 0.5, 0),
            ("nesterov", (0.1, 0.0), 0.9, 0.0, 1)):
        def make(leaves, decay=decay, momentum=momentum, dampening=dampening, nesterov=nesterov):
            groups = [dict(params=[p], weight_decay=d) for p, d in zip(leaves, decay)]
            return torch.optim.SGD(groups, lr=1.0, momentum=momentum, dampening=dampening,
                                   nesterov=bool(nesterov), foreach=False)
        update(book, f"sgd.{label}", "sgd", make, {"momentum_buffer": "m"} if momentum else {},
               decay=decay, momentum=momentum, dampening=dampening, nesterov=nesterov)
