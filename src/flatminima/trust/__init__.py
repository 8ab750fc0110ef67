"""The audit: measure, move along the symmetries, measure again; the trust table says which numbers survived."""

from flatminima.trust.audit import audit
from flatminima.trust.result import Attack, Audit, MinimumCheck, Reading, Row, Spectrum, SymmetryRecord

__all__ = ["Attack", "Audit", "MinimumCheck", "Reading", "Row", "Spectrum", "SymmetryRecord", "audit"]
