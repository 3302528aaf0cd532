"""Forebay: the activation memory of Mixture-of-Experts training. Public names, nothing else."""

from forebay.loss import linear_cross_entropy
from forebay.models.manage import Managed, manage
from forebay.moe.experts import experts
from forebay.policy import BudgetError, PolicyError

__all__ = ["BudgetError", "Managed", "PolicyError", "experts", "linear_cross_entropy", "manage"]
