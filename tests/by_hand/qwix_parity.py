"""Compares a rounded product and its gradients with qwix's; prints the largest differences.

pip install -e '.[hf]' && python -m tests.by_hand.qwix_parity

In int8, qwix's largest number is 127.5; results with that are printed too. Differences are relative to
the largest value. Models don't use qwix: its products ignore out_sharding, which Explicit axes need, and
see a weight only after FSDP gathered it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from zoo.quantization import FORMATS, Product, multiply_rounded, quantize

B, T, K, N = 4, 64, 512, 384
X_TIMES_W = (((2,), (0,)), ((), ()))


def main() -> None:
    from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt

    random = np.random.default_rng(0)
    x_BTK, w_KN, grad_BTN = (
        jnp.asarray(random.standard_normal(shape, np.float32))
        for shape in ((B, T, K), (K, N), (B, T, N))
    )
    x_BTK *= np.exp(random.standard_normal((B, T, 1), np.float32))  # rows of unlike size

    FORMATS["int8 to 127.5"] = ((jnp.int8, 127.5),) * 3
    for matmul in ("int8", "int8 to 127.5", "fp8"):
        of_weights, of_rows, gradients = FORMATS[matmul]
        kinds = {"lhs_qtype": of_rows[0], "rhs_qtype": of_weights[0]}
        kinds |= {"dlhs_grad_qtype": gradients[0], "drhs_grad_qtype": gradients[0]}

        def theirs(x, w, kinds=kinds):
            return dot_general_qt(x, w, X_TIMES_W, DotGeneralQtConfig(**kinds))

        def ours(x, w, matmul=matmul):
            of_weights, of_rows, _ = FORMATS[matmul]
            q, scale = quantize(jax.lax.stop_gradient(w)[None], (1,), of_weights)
            rounded = quantize(jax.lax.stop_gradient(x), (-1,), of_rows)
            how = Product(matmul, "", (), (), ((),) * 2, (), shapes=((K, N), (K,), (N,)))
            return multiply_rounded(how, x, w, *rounded, q, scale)

        results = []
        for function in (theirs, ours, lambda x, w: x @ w):
            y, pull = jax.vjp(function, x_BTK, w_KN)
            results.append((y, *pull(grad_BTN)))
        for name, a, b, exact in zip(("product", "gradient of x", "of w"), *results, strict=True):
            largest = jnp.abs(exact).max()
            apart, own = (float(jnp.abs(b - other).max() / largest) for other in (a, exact))
            print(f"{matmul}, {name}: {apart:.1e} from qwix, {own:.1e} from float32")


if __name__ == "__main__":
    main()
