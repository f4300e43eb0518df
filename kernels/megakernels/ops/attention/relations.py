"""Relations: a score a head of each key's class, added to the scaled scores of every query that sees the key.

s = scale · q kᵀ + b, b [key, head] = relations[class of the key, head]. With ds the gradient of the scores, ∂L/∂b sums ds over the queries,
and ∂L/∂relations sums ∂L/∂b over the keys of a class. No array of queries × keys is kept.

Source: additive attention biases as in arXiv:1910.10683, section 2.1, looked up by the key alone.
"""

import torch
from torch import Tensor

from megakernels._common import require, upcast


def require_relations(operation: str, classes: Tensor | None, relations: Tensor | None, q: Tensor, keys: Tensor) -> None:
    """Refuse relations without classes, or shapes that are not a class for each key and a score for each class and head.

    Raises:
        ValueError: Shapes do not fit.
    """
    shapes = {name: None if each is None else each.shape for name, each in (("classes", classes), ("relations", relations))}
    both = (classes is None) == (relations is None)
    require(both, operation, "classes and relations are given together", **shapes)
    fits = classes is None or relations is None or (classes.shape == keys.shape[:2] and relations.shape[1:] == q.shape[2:3])
    require(fits, operation, "classes must be [B,T], relations [R,Hq]", q=q.shape, **shapes)


def key_scores(classes: Tensor | None, relations: Tensor | None) -> Tensor | None:
    """B [B, H, T] in the accumulation dtype; None without relations."""
    if classes is None or relations is None:
        return None
    return upcast(relations)[classes.long()].transpose(1, 2)


def relations_gradient(grad_scores: Tensor, classes: Tensor, relations: Tensor) -> Tensor:
    """∂L/∂relations [R, H] in the dtype of relations, of ∂L/∂b [B, H, T]; equal classes are summed in a fixed order."""
    total = torch.zeros(relations.shape, dtype=grad_scores.dtype, device=relations.device)
    total.index_put_((classes.long().flatten(),), grad_scores.transpose(1, 2).flatten(0, 1), accumulate=True)
    return total.to(relations.dtype)
