r"""The share of each micro-batch in the loss of the whole batch.

A mean over a micro-batch of weight $w_k$ has the share $w_k / W$, known before its backward. The denominator of a
``Ratio`` is known only after the last forward: backward is divided by a provisional one, $P$, of about the right size
(so that fp16 neither overflows nor vanishes), and the gradient is multiplied by $P / W$ at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bigbatch.batch.logical import Piece, Pieces
from bigbatch.errors import LossError
from bigbatch.stepping.losses import Kind, Term
from bigbatch.stepping.precision import at_least_float32

Group = str | None
"""Terms whose gradients need the same correction; None for those that need none."""

Factor = torch.Tensor | float


class Share(NamedTuple):
    """Part of a backward.

    Attributes:
        group: Which gradients it is added to.
        value: The term, with its graph; shape ``()``.
        coefficient: What its gradient is multiplied by.
    """

    group: Group
    value: torch.Tensor
    coefficient: Factor


@dataclass
class _Account:
    """What was seen of one term, without graphs."""

    values: list[torch.Tensor] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)  # of a mean: its weights; of a sum or constant: 1
    denominators: list[torch.Tensor] = field(default_factory=list)
    provisional: Factor = 1.0

    def lists(self) -> tuple[list[Any], ...]:
        return self.values, self.coefficients, self.denominators


class Shares:
    """Divides the loss of one step among its micro-batches, and puts it together again.

    Args:
        pieces: The micro-batches of the step; of them only how many there are, and their weights.
    """

    def __init__(self, pieces: Pieces):
        self._totals = pieces.totals
        self._part = pieces.part
        self._single = self._part.num_micro_batches == 1
        self._num_samples = pieces.num_samples
        self._accounts: dict[str, _Account] = {}
        self._kinds: list[tuple[str, Kind]] = []
        self._weights_added: dict[Any, float] = {}
        self._corrected = False
        self._over_ranks: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def only_means(self) -> bool:
        """Whether the loss is known to consist of means, so that a weight of 0 leaves nothing to do."""
        return bool(self._kinds) and all(kind == "mean" for _, kind in self._kinds)

    @property
    def has_means(self) -> bool:
        """Whether some term is a mean, which needs a weight."""
        return any(kind == "mean" for _, kind in self._kinds)

    @property
    def has_constants(self) -> bool:
        """Whether some term counts in the first micro-batch alone."""
        return any(kind == "constant" for _, kind in self._kinds)

    @property
    def num_backwards(self) -> int:
        """Backwards for each micro-batch: one for each denominator that is known late, one for all other terms."""
        late = sum(self._is_late(kind) for _, kind in self._kinds)
        return late + (late < len(self._kinds))

    @property
    def groups(self) -> list[Group]:
        """Those of the backwards, in one order whatever the micro-batches are."""
        return list(dict.fromkeys(name if self._is_late(kind) else None for name, kind in self._kinds))

    def _is_late(self, kind: str) -> bool:
        return (kind == "ratio" and not self._single) or (kind == "mean" and self._totals is None)

    def of(self, terms: list[Term], piece: Piece) -> list[Share]:
        """What of a micro-batch is to be backpropagated, and how much it counts.

        Raises:
            LossError: The terms are others than before, or one has no weight.
        """
        self._check_same_terms(terms, piece)
        for key, weight in piece.weights.items() if self._totals is None else ():
            self._weights_added[key] = self._weights_added.get(key, 0.0) + weight
        found = [share for term in terms if (share := self._share(term, piece)) is not None]
        if self._part.scale != 1.0:
            return [share._replace(coefficient=share.coefficient * self._part.scale) for share in found]
        return found

    def idle(self, terms: list[Term], piece: Piece) -> list[Share]:
        """The same of a micro-batch that counts nothing, but must be backpropagated."""
        self._check_same_terms(terms, piece)
        late = next((name for name, kind in self._kinds if self._is_late(kind)), None)
        return [Share(late, term.value, 0.0) for term in terms]

    def _share(self, term: Term, piece: Piece) -> Share | None:
        account = self._accounts[term.name]
        if term.value.dtype != at_least_float32(term.value.dtype):
            # A share such as 1 / 3000 has three digits in float16; backward rounds it after the loss scale is on it.
            term = term._replace(value=term.value.float())
        if term.kind == "ratio":
            return self._ratio_share(account, term, piece)
        if term.kind == "mean":
            return self._mean_share(account, term, piece)
        if term.kind == "constant" and (account.values or not self._part.has_constants):
            # Where a backward must reach all parameters, as far as the graph of this term does.
            return Share(None, term.value, 0.0) if self._part.summed_inside else None
        account.values.append(_number_of(term.value))
        account.coefficients.append(1.0)
        return Share(None, term.value, 1.0)

    def _mean_share(self, account: _Account, term: Term, piece: Piece) -> Share | None:
        key = _weight_key(term, piece)
        weight = piece.weights[key]
        if weight == 0:
            # The mean over nothing is 0 / 0, which must not reach the sum.
            return Share(None, term.value, 0.0) if self._part.summed_inside else None
        account.values.append(_number_of(term.value))
        account.coefficients.append(weight)
        if self._totals is not None:
            return Share(None, term.value, weight / self._totals[key])
        if len(account.values) == 1:
            account.provisional = weight * self._growth(piece)
        return Share(term.name, term.value, weight / account.provisional)

    def _ratio_share(self, account: _Account, term: Term, piece: Piece) -> Share:
        value = _number_of(term.value)
        denominator = torch.as_tensor(term.denominator, dtype=at_least_float32(value.dtype), device=value.device)
        if not account.values:
            # On the device: the host does not know the denominator, and need not.
            # Alone, it is final: then 0 must become NaN, as it does in the correction of several.
            expected = denominator * self._growth(piece)
            otherwise = torch.nan if self._single else float(max(self._num_samples, 1))
            account.provisional = torch.where(expected > 0, expected, otherwise)
            if (self._part.summed_inside or self._part.is_joined) and not self._single:
                account.provisional = self._same_provisional
        account.values.append(value)
        account.denominators.append(denominator)
        return Share(None if self._single else term.name, term.value, 1.0 / account.provisional)

    @property
    def _same_provisional(self) -> float:
        """What is the same on all ranks, also on one that has no micro-batch."""
        return float(max(self._part.num_samples, 1))

    def _growth(self, piece: Piece) -> float:
        """How much larger the whole batch is than this micro-batch, as far as that is known."""
        return self._num_samples / piece.num_samples if self._num_samples and piece.num_samples else 1.0

    def _check_same_terms(self, terms: list[Term], piece: Piece) -> None:
        kinds = [term[:2] for term in terms]  # name and kind
        if not self._kinds:
            if len({name for name, _ in kinds}) < len(kinds):
                raise LossError(f"Two terms of the loss have the same name: {[name for name, _ in kinds]}.")
            means = {term.name for term in terms if term.kind == "mean"}
            for term in terms:
                if term.kind == "mean":
                    _weight_key(term, piece)
            if unused := sorted(str(key) for key in piece.weights if key is not None and key not in means):
                raise LossError(
                    f"weight has the terms {unused}, but the loss has no mean of that name: it has {_list(kinds)}. "
                    f"Leave them out, or name them as the loss does."
                )
            self._kinds = kinds
            self._accounts = {name: _Account() for name, _ in kinds}
        elif kinds != self._kinds:
            raise LossError(
                f"loss_fn returned the terms {_list(kinds)}, but for an earlier micro-batch {_list(self._kinds)}. "
                f"Return the same terms each time; a term without samples is Ratio(0 * something, 0)."
            )

    def mark(self) -> list[tuple[int, ...]]:
        """Where the accounts are now, for ``go_back``."""
        return [tuple(map(len, account.lists())) for account in self._accounts.values()]

    def go_back(self, mark: list[tuple[int, ...]]) -> None:
        """Forget the micro-batches since, or a part of one."""
        for account, lengths in zip(self._accounts.values(), mark, strict=True):
            for kept, length in zip(account.lists(), lengths, strict=True):
                del kept[length:]

    def corrections(self) -> dict[Group, Factor]:
        """By group, what its gradient is still to be multiplied by. Groups that need nothing are left out."""
        return {} if self._corrected else self._factors()

    def _factors(self) -> dict[Group, Factor]:
        found: dict[Group, Factor] = {}
        for name, kind in self._kinds:
            account = self._accounts[name]
            if kind == "ratio" and not self._single:
                if self._part.summed_inside or self._part.is_joined:
                    found[name] = self._same_provisional / self._denominator(name)
                elif account.values:
                    found[name] = account.provisional / self._denominator(name)
            elif kind == "mean" and self._totals is None and account.values:
                found[name] = account.provisional / sum(account.coefficients)
        return found

    @property
    def factor_of_contributions(self) -> Factor:
        """What the gradient of a backward is to be multiplied by to be its part of that of the batch, of one group."""
        return next(iter(self._factors().values()), 1.0) / self._part.scale

    def take_corrections(self) -> dict[Group, Factor]:
        """The same for the last time: from now on nothing is left to be corrected."""
        found, self._corrected = self.corrections(), True
        return found

    def term_losses(self) -> dict[str, torch.Tensor]:
        """Each term of the whole batch, shape ``()``."""
        return {name: self._term_loss(name, kind) for name, kind in self._kinds}

    @property
    def kinds(self) -> list[tuple[str, Kind]]:
        """Names and kinds of the terms, when a micro-batch was seen."""
        return self._kinds

    def sums(self) -> list[float]:
        """Two numbers for each term, which are added over ranks: numerator and denominator. Waits for the device."""
        pairs = [pair for name, kind in self._kinds for pair in self._pair(name, kind)]
        return torch.stack([value.double().cpu() for value in pairs]).tolist() if pairs else []

    def _pair(self, name: str, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added over ranks of one term."""
        account = self._accounts[name]
        if not account.values:
            return torch.zeros(()), torch.zeros(())
        values = torch.stack(account.values)
        values = values.to(at_least_float32(values.dtype))
        if kind == "ratio":
            stacked = torch.stack(account.denominators)
            return values.sum(), torch.where((stacked >= 0).all(), stacked.sum(), torch.nan)
        weights = values.new_tensor(account.coefficients)
        return values @ weights, weights.sum() if kind == "mean" else torch.zeros(())

    def settle(self, kinds: list[tuple[str, Kind]], sums: list[float]) -> None:
        """Go on with the terms of all ranks.

        Args:
            kinds: Of a rank that has seen a micro-batch.
            sums: What ``sums`` gave, added over the ranks.
        """
        if not self._kinds:
            self._kinds, self._accounts = kinds, {name: _Account() for name, _ in kinds}
        values = {name: account.values[:1] for name, account in self._accounts.items()}
        like = {name: found[0] if found else torch.zeros((), dtype=torch.float64) for name, found in values.items()}
        numbers = {name: like[name].new_tensor(sums[2 * i : 2 * i + 2]) for i, (name, _) in enumerate(kinds)}
        self._over_ranks = {name: (pair[0], pair[1]) for name, pair in numbers.items()}

    def _denominator(self, name: str) -> torch.Tensor:
        if self._over_ranks is None:
            return _total(self._accounts[name].denominators)
        return _total([self._over_ranks[name][1]])

    def _term_loss(self, name: str, kind: str) -> torch.Tensor:
        account = self._accounts[name]
        if self._over_ranks is not None:
            numerator, denominator = self._over_ranks[name]
            if kind == "ratio":
                return numerator / self._denominator(name)
            return numerator / denominator if kind == "mean" and float(denominator) != 0 else numerator
        if not account.values:
            return torch.zeros(())
        values = torch.stack(account.values)
        values = values.to(at_least_float32(values.dtype))
        if kind == "ratio":
            return values.sum() / self._denominator(name)
        if kind != "mean":
            return values.sum()
        if len(set(account.coefficients)) == 1:
            return values.mean()
        total = sum(account.coefficients)
        return values @ values.new_tensor([weight / total for weight in account.coefficients])

    def micro_batch_losses(self) -> dict[str, torch.Tensor]:
        """Each term by micro-batch that counted, shape ``(K,)``: to find the one that is not finite."""
        return {name: torch.stack(account.values) for name, account in self._accounts.items() if account.values}

    def check_denominators(self) -> None:
        """Raise ``LossError`` if those of a ratio add up to 0 or one is negative. Waits for the device."""
        for name, kind in self._kinds:
            if kind == "ratio" and not bool(torch.isfinite(self._denominator(name))):
                found = [float(denominator) for denominator in self._accounts[name].denominators]
                raise LossError(
                    f"The denominators of the term {name!r} are {found[:6]}{' ...' if len(found) > 6 else ''} in the "
                    "micro-batches: they are not negative, and add up to more than 0. If nothing in this batch "
                    f"counts (for example, every token is padding), leave it out."
                )

    def weight(self) -> Factor:
        """What the first term is over: samples, tokens, or the denominator of a ratio."""
        if self._kinds and self._kinds[0][1] == "ratio":
            return self._denominator(self._kinds[0][0])
        return next(iter((self._totals or self._weights_added).values()), 1.0)


def _weight_key(term: Term, piece: Piece) -> str | None:
    if None in piece.weights:
        return None
    if term.name not in piece.weights:
        raise LossError(
            f"weight has the terms {sorted(map(str, piece.weights))}, but the loss has a mean named {term.name!r}. "
            f"Give its weight too, or return it as a Ratio, Sum or Constant."
        )
    return term.name


def _total(denominators: list[torch.Tensor]) -> torch.Tensor:
    """Sum of the denominators; NaN when it is 0 or one is negative, which the finite check finds in its one read."""
    stacked = torch.stack(denominators)
    total = stacked.sum()
    return torch.where((stacked >= 0).all() & (total > 0), total, torch.nan)


def _list(kinds: list[tuple[str, Kind]]) -> str:
    return ", ".join(f"{name!r} ({kind})" for name, kind in kinds)


def _number_of(value: torch.Tensor) -> torch.Tensor:
    """The number without its graph; and without what some kernels (``mse_loss``) leave in its storage, all outputs."""
    number = value.detach()
    return number if number.untyped_storage().nbytes() == number.nbytes else number.clone()
