"""The same amount of work in PyTorch, for comparison where torch is installed: nanoGPT's model.

GPT-2's block: layer norm, multi-head attention by scaled_dot_product_attention, and a GELU MLP wide
enough for as many multiplications as our SwiGLU; compiled, with AdamW and gradient clipping.
"""

from recipes.bench.common import version
from zoo.transformer import Config


class Step:
    """Calling it runs one training step; `wait` waits for the device."""

    def __init__(self, config: Config, batch_size: int, seq_len: int, device: str):
        import torch
        from torch.nn import functional

        hidden = config.mlp * 3 // 2
        D, N = config.embed, config.num_heads

        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(D) for _ in range(2)])
                self.qkv = torch.nn.Linear(D, 3 * D, bias=False)
                self.o = torch.nn.Linear(D, D, bias=False)
                self.up = torch.nn.Linear(D, hidden, bias=False)
                self.down = torch.nn.Linear(hidden, D, bias=False)

            def forward(self, x):
                B, T, _ = x.shape
                q, k, v = self.qkv(self.norms[0](x)).view(B, T, 3, N, D // N).permute(2, 0, 3, 1, 4)
                out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + self.o(out.transpose(1, 2).reshape(B, T, D))
                return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = torch.nn.Embedding(config.vocab_size, D)
                self.position = torch.nn.Embedding(seq_len, D)
                self.blocks = torch.nn.ModuleList([Block() for _ in range(config.num_layers)])
                self.norm = torch.nn.LayerNorm(D)

            def forward(self, tokens, targets):
                x = self.embed(tokens) + self.position.weight
                for block in self.blocks:
                    x = block(x)
                logits = functional.linear(self.norm(x), self.embed.weight).flatten(0, 1)
                return functional.cross_entropy(logits, targets.flatten())

        self._torch, self._device = torch, device
        self._model = Model().to(device)
        self._compiled = torch.compile(self._model)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-3, fused=device == "cuda"
        )
        window = torch.randint(0, 256, (batch_size, seq_len + 1), device=device)
        self._tokens, self._targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def __call__(self) -> None:
        torch = self._torch
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device == "cuda"):
            loss = self._compiled(self._tokens, self._targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()


def cpu_step(config: Config, batch_size: int, seq_len: int) -> Step | None:
    """None if there is no PyTorch."""
    return Step(config, batch_size, seq_len, "cpu") if version("torch") else None


def gpu_step(config: Config, batch_size: int, seq_len: int) -> Step | None:
    """None if there is no PyTorch, or it finds no GPU."""
    if not version("torch"):
        return None
    import torch

    return Step(config, batch_size, seq_len, "cuda") if torch.cuda.is_available() else None
