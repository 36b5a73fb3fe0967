"""What stands in a model's outputs where logits were not kept."""

from typing import Any


class LogitsNotKept(NotImplementedError, AttributeError):
    """Logits are asked for, and were not kept.

    It is an AttributeError, too, since libraries look for attributes of all that a model returns.
    """


class NoLogits:
    """Stands where a model's outputs would have logits [B, S, V]; raises LogitsNotKept when it is
    used as if it were a tensor."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise LogitsNotKept(
            "outputs.logits of a call with labels: the loss is computed in chunks, and the logits "
            "of all tokens are not kept; read outputs.loss, or outputs.log_probs and "
            "outputs.entropy in a class that sets flexseq_loss_at_home = True"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and inspection ask for these
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse functions of torch."""
        return cls()._refuse()

    def __repr__(self) -> str:
        return "NoLogits()"

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = _refuse


NO_LOGITS = NoLogits()
