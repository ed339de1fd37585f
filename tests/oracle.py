"""An independent oracle: every method as one plain numpy float64 loop over dense matrices.

Written from the equations alone (the paper's Algorithms 1 and 2, and the decisions that settle its gaps), without a look at
the package and without importing it: two engines that share code can share an error, this one shares none.

Notation: X = [x_1 ... x_n] stacked by rows, J = 11'/n, gamma = lr(k), "half" = x^(k+1/2) (after the local step, before mixing).
"""

from typing import NamedTuple

import numpy as np


class Trajectory(NamedTuple):
    X: np.ndarray  # [steps + 1, n, d] the models a user sees (osgp: z = x / w); X[k + 1] is after step k and its mixing
    losses: np.ndarray  # [steps, n] of step k, at the models before it
    periods: list  # [steps] the period in force after step k; None where a method has none
    w: np.ndarray  # [steps + 1, n] push-sum weights; ones for the other methods
    mass: np.ndarray  # [steps + 1, d] the mean over nodes; osgp: (sum of numerators, at nodes and in flight) / n


def coded(x, bits):
    """Q(x): what a receiver makes of the code of x [d]; blocks of 256 numbers, each with its own scale."""
    q = np.zeros_like(x)
    for start in range(0, len(x), 256):
        block = np.zeros(256, dtype=np.float32)
        own = x[start : start + 256].astype(np.float32)
        block[: len(own)] = own
        if bits == 16:  # bfloat16: the upper half of a float32, rounded to nearest, ties to even
            raw = block.view(np.uint32)
            back = ((raw + 0x7FFF + ((raw >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
        else:
            largest = np.abs(block).max()
            e = 0 if largest == 0 else int(np.floor(np.log2(np.float64(largest))))
            v = (block.astype(np.float64) * 2.0**-e).astype(np.float32)
            low, top = v.min(), np.float32(2**bits - 1)
            if bits == 4:
                low = np.float32(np.float16(low))
                step = np.float32(np.float16((v.max() - low) / top))
                step = np.float32(1) if step == 0 else step
                inverse = np.float32(1) / step
            else:
                step = (v.max() - low) / top
                inverse = top / (v.max() - low + np.float32(1e-8))
            code = np.clip(np.rint((v - low) * inverse), 0, top)
            back = (code.astype(np.float64) * step + low).astype(np.float32).astype(np.float64) * 2.0**e
        q[start : start + 256] = back[: len(own)]
    return q


def oracle(
    method,
    Ws,
    gradient,
    x0,
    lr,
    steps,
    *,
    H=None,
    warmup=None,
    H_init=4,
    H_max=64,
    exponent=1.0,
    momentum=0.5,
    slow_lr=1.0,
    outer_lr=0.7,
    outer_momentum=0.9,
    H_min=None,
    power=1.0,
    delay=0,
    average_rounds=None,
    nesterov=0.0,
    bits=32,
):
    """Returns Trajectory(X, losses, periods, w, mass). With H_min, the period follows the learning rate."""
    assert method in ("parallel_sgd", "local_sgd", "gossip_sgd", "gossip_pga", "gossip_aga", "slowmo", "diloco", "osgp"), method
    assert delay == 0 or (delay == 1 and method in ("gossip_sgd", "gossip_pga", "gossip_aga", "osgp")), (method, delay)
    assert average_rounds is None or method in ("gossip_sgd", "gossip_pga", "gossip_aga"), (method, average_rounds)
    assert (H is None) != (H_min is None) or method not in ("local_sgd", "gossip_pga", "slowmo", "diloco"), f"{method} needs H or H_min"
    assert warmup is not None or method != "gossip_aga", "gossip_aga needs warmup"

    n, d = len(Ws[0]), len(x0)
    identity = np.eye(n)
    J = np.ones((n, n)) / n

    x = np.tile(np.asarray(x0, dtype=np.float64), (n, 1))  # x_i^(0) = x0; for osgp the numerators
    w = np.ones(n)  # osgp: w_i^(0) = 1
    buf = np.zeros((n, d))  # the optimizer's momentum buffers, one per node, never averaged
    x_arriving, w_arriving = np.zeros((n, d)), np.zeros(n)  # osgp, delay 1: what is in flight; nothing at k = 0
    x_prev, u = x[0].copy(), np.zeros(d)  # slowmo, diloco: the last global point and the slow momentum
    x_ref, left_out = x[0].copy(), np.zeros((n, d))  # bits < 32: the last global average, and what codes left out of global rounds
    C, F_samples = 0, []  # a period that changes: steps since the last global round; gossip_aga: the warm-up's losses, F_init = their mean
    largest_lr = 0.0  # H_min: of the global rounds so far

    if method == "parallel_sgd":
        H = 1
    elif method == "gossip_aga":
        H = H_init
    elif H_min is not None:
        H = H_min
    elif method in ("gossip_sgd", "osgp"):
        H = None

    X_all, losses_all, periods_all, w_all, mass_all = [x / w[:, None]], [], [], [w], [x.sum(axis=0) / n]

    for k in range(steps):
        W = np.asarray(Ws[k % len(Ws)], dtype=np.float64)
        if method == "local_sgd":
            W = identity

        # Local step of each node, at the model it sees:  x_i^(k+1/2) = x_i^(k) - gamma (g_i + m buf_i),  buf_i <- m buf_i + g_i
        # (buf_i = g_i at the first step, as it starts from 0). osgp: g_i is taken at z_i = x_i / w_i, and
        # x_i^(k+1/2) = x_i^(k) + (opt(z_i^(k)) - z_i^(k)), that is the same unscaled step on the numerator.
        half, losses = np.zeros((n, d)), np.zeros(n)
        for i in range(n):
            losses[i], g = gradient(i, k, x[i] / w[i])
            buf[i] = nesterov * buf[i] + g
            half[i] = x[i] - lr(k) * (g + nesterov * buf[i])

        # Is step k a global round?  Algorithm 1: mod(k + 1, H) = 0.  Algorithm 2: C <- C + 1;  if C = H: C <- 0, global.
        if method == "gossip_aga" or H_min is not None:
            C = C + 1
            is_global = C == H
            if is_global:
                C = 0
        else:
            is_global = H is not None and (k + 1) % H == 0

        if method == "osgp":
            # x_i^(k+1) = p_ii x_i^(k+1/2) + sum_{j != i} p_ij x_j^(k-delay+1/2),   w likewise; P is that of the step a message was sent at
            kept = np.diag(np.diag(W))
            x_sent, w_sent = (W - kept) @ half, (W - kept) @ w
            if delay == 0:
                x, w = kept @ half + x_sent, kept @ w + w_sent
            else:
                x, w = kept @ half + x_arriving, kept @ w + w_arriving
                x_arriving, w_arriving = x_sent, w_sent
        elif bits < 32 and k >= delay:
            # q_i = Q(x_i - x_ref), of the models that are sent: x^(k+1/2), or x^(k) with delay 1 (all alike at k = 0)
            sent = half if delay == 0 else x
            if is_global and average_rounds is None:
                # each node sends Q of its difference and of what it left out before; block b belongs to the node i with
                # floor(B i / n) <= b < floor(B (i + 1) / n), which averages it, sends Q of the mean, and leaves out the rest n times
                wanted = sent - x_ref + left_out
                codes = np.array([coded(row, bits) for row in wanted])
                left_out = wanted - codes
                mean = codes.mean(axis=0)
                result = coded(mean, bits)
                blocks = -(-d // 256)
                for i in range(n):
                    owned = slice(256 * (blocks * i // n), 256 * (blocks * (i + 1) // n))
                    left_out[i, owned] += n * (mean - result)[owned]
                x_bar = x_ref + result
                x_ref = x_bar
                if method == "slowmo":
                    u = momentum * u + (x_prev - x_bar) / lr(k)
                    x_prev = x_ref = x_prev - slow_lr * lr(k) * u
                elif method == "diloco":
                    u = outer_momentum * u + (x_prev - x_bar)
                    x_prev = x_ref = x_prev - outer_lr * ((x_prev - x_bar) + outer_momentum * u)
                x = np.tile(x_ref, (n, 1)) if delay == 0 else half + x_ref - sent
            else:
                # x_i <- x_i + sum_j w_ij (q_j - q_i), m times with average_rounds = m
                mixed = sent.copy()
                for r in range(average_rounds if is_global else 1):
                    codes = np.array([coded(row - x_ref, bits) for row in mixed])
                    V = identity if method == "local_sgd" else np.asarray(Ws[(k + r) % len(Ws)], dtype=np.float64)
                    mixed = mixed + (V - identity) @ codes
                x = half + mixed - sent
        elif method == "slowmo" and is_global:
            # u <- m u + (x_prev - x_bar) / gamma;   x <- x_prev - slow_lr gamma u;   x_prev <- x
            u = momentum * u + (x_prev - half.mean(axis=0)) / lr(k)
            x_prev = x_prev - slow_lr * lr(k) * u
            x = np.tile(x_prev, (n, 1))
        elif method == "diloco" and is_global:
            # d = x_prev - x_bar;   u <- m u + d;   x <- x_prev - outer_lr (d + m u);   x_prev <- x
            difference = x_prev - half.mean(axis=0)
            u = outer_momentum * u + difference
            x_prev = x_prev - outer_lr * (difference + outer_momentum * u)
            x = np.tile(x_prev, (n, 1))
        else:
            # M_k = W_k, at a global round J, or W_{k+m-1} ... W_{k+1} W_k with average_rounds = m
            M = W
            if is_global and average_rounds is None:
                M = J
            elif is_global:
                M = identity
                for r in range(average_rounds):
                    M = np.asarray(Ws[(k + r) % len(Ws)], dtype=np.float64) @ M
            # delay 0:  X^(k+1) = M_k X^(k+1/2)          delay 1:  X^(k+1) = X^(k+1/2) + (M_k - I) X^(k)
            x = M @ half if delay == 0 else half + (M - identity) @ x

        if method == "gossip_aga" and is_global and k - delay >= 0:
            # F = 1/n sum_i F_i of step k - delay;  k < K_w: F is a sample, F_init = mean of the samples (as is F if there is none yet);
            # else H <- ceil((F_init / F)^exponent H_init - 1e-9), within 1 ... H_max.  F not finite or not positive: nothing.
            F = np.mean(losses if delay == 0 else losses_all[k - 1])
            if np.isfinite(F) and F > 0:
                if k < warmup or len(F_samples) == 0:
                    F_samples.append(F)
                else:
                    ratio = np.mean(F_samples) / F
                    H = int(np.clip(np.ceil(ratio**exponent * H_init - 1e-9), 1, H_max))

        if H_min is not None and is_global and k - delay >= 0:
            # H <- H_min (largest lr so far / lr of step k - delay)^power, rounded to the nearest (a half up), within H_min ... H_max
            largest_lr = max(largest_lr, lr(k - delay))
            H = int(np.clip(np.floor(H_min * (largest_lr / lr(k - delay)) ** power + 0.5 + 1e-9), H_min, H_max))

        X_all.append(x / w[:, None])
        losses_all.append(losses)
        periods_all.append(H)
        w_all.append(w)
        mass_all.append((x.sum(axis=0) + x_arriving.sum(axis=0)) / n)

    return Trajectory(np.array(X_all), np.array(losses_all).reshape(steps, n), periods_all, np.array(w_all), np.array(mass_all))
