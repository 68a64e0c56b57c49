"""The options of the loss, in which public implementations of the recipe differ."""

import dataclasses

from dspark_jax.core.errors import UserError, check_choice


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the terms, and all that implementations compute differently (paper section 3.3).

    p_t is the target's distribution, p_d the drafter's; slot k of a block stands at position a + k
    of its row, a the anchor. Presets over these fields: core/semantics.py.

    Attributes:
      ce: weight of the cross-entropy.
      l1: weight of the distance between p_d and p_t.
      kl: weight of KL(p_t || p_d), not in the paper: for data too short to show what else could
        follow. The default of speculators.
      confidence: weight of the binary cross-entropy of the confidence head, whose label is the
        acceptance probability 1 - sum |p_d - p_t| / 2, without gradient.
      decay: the k-th proposal weighs exp(-k / decay); 0 = all weigh the same. EAGLE-3 has
        drafter.eagle3.step_loss_decay instead.
      distance: what `l1` weighs: "l1" = sum |p_d - p_t|, "tv" = half of it, the total variation.
      ce_label: "data" = the data's token, "target" = the token that p_t says is most probable.
      teacher: p_t under a pruned vocabulary: "whole" = over all the target can say, so that what
        the drafter cannot propose is lost; "draft" = renormalised to what it can propose. Reported
        acceptances always are of the whole.
      anchors: which generated tokens a block may begin at: "next" = those whose next token is
        generated too; "block" = those with a whole block's length behind them in the row.
      supervision: "prefix" = up to the first slot that may not be supervised, "slot" = each slot
        by itself.
      mask_at: a slot may be supervised where the loss mask is set at its "label", or at the "slot"
        itself: anchor-first, that is one token before the label, and so one token beyond the end
        of an answer is learnt.
      cross_documents: blocks go on into the next document of a packed row.
      denominator: sums are divided by those of the slots' "weights", or by the number of "slots".
      average_over: where that division is made: over the global "batch"; or over each
        "micro_batch" or "row", whose results are averaged, so that a slot's weight depends on
        where it lies.
    """

    ce: float = 0.1
    l1: float = 0.9
    kl: float = 0.0
    confidence: float = 1.0
    decay: float = 4.0
    distance: str = "l1"
    ce_label: str = "data"
    teacher: str = "whole"
    anchors: str = "next"
    supervision: str = "prefix"
    mask_at: str = "label"
    cross_documents: bool = False
    denominator: str = "weights"
    average_over: str = "batch"

    def __post_init__(self) -> None:
        for name, choices in (
            ("distance", ("l1", "tv")),
            ("ce_label", ("data", "target")),
            ("teacher", ("whole", "draft")),
            ("anchors", ("next", "block")),
            ("supervision", ("prefix", "slot")),
            ("mask_at", ("label", "slot")),
            ("denominator", ("weights", "slots")),
            ("average_over", ("batch", "micro_batch", "row")),
        ):
            check_choice(f"loss.{name}", getattr(self, name), choices)
        for name in ("ce", "l1", "kl", "confidence", "decay"):
            if not getattr(self, name) >= 0:
                raise UserError(f"loss.{name}={getattr(self, name)}: at least 0")

    @property
    def distance_scale(self) -> float:
        """What the distance is of sum |p_d - p_t|."""
        return 0.5 if self.distance == "tv" else 1.0


# Of EAGLE-3: the target's distribution is all that it is taught (DeepSpec and speculators alike).
EAGLE3_LOSS = LossConfig(ce=0.0, l1=0.0, kl=1.0, confidence=0.0)
