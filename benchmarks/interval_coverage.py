"""How often 95 % intervals hold the truth, by Student's t, by Hall's transform, and by the outer ends of both.

The samples are what a random probe gives of a matrix with few large eigenvalues: weighted sums of squares of normal numbers.
What the docstring of ``Estimate.interval`` says comes from here:

    python benchmarks/interval_coverage.py
"""

from __future__ import annotations

import torch
from scipy.stats import t

from flatminima.estimators import Estimate

_NUM_RUNS = 40_000
_NUM_SAMPLES = (5, 10, 30, 100)
#: Large eigenvalues, and the standard deviation of what the many small ones add.
_SPECTRA = {
    "one dominates": ((1.0,), 0.1),
    "two of opposite sign": ((1.0, -0.9), 0.0),
    "five equal": ((1.0,) * 5, 0.0),
    "many small ones": ((), 1.0),
}


def main() -> None:
    """Print one row a spectrum and number of samples."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print(f"{'spectrum':<22}{'samples':>8}{'t':>8}{'Hall':>8}{'outer':>8}   ({_NUM_RUNS:,} runs each)")
    for name, (values, noise) in _SPECTRA.items():
        for num_samples in _NUM_SAMPLES:
            shape = (num_samples, _NUM_RUNS)
            samples = noise * torch.randn(shape, generator=generator, dtype=torch.float64)
            for value in values:
                samples += value * torch.randn(shape, generator=generator, dtype=torch.float64) ** 2
            shares = "".join(f"{share:8.1%}" for share in _shares(samples, sum(values)))
            print(f"{name:<22}{num_samples:>8}{shares}")


def _shares(samples: torch.Tensor, truth: float) -> tuple[float, float, float]:
    """Return the shares of runs whose interval holds the truth."""
    num_samples, mean = len(samples), samples.mean(0)
    centred = samples - mean
    skewness = (centred**3).mean(0) / (centred**2).mean(0) ** 1.5
    stderr = samples.std(0) / num_samples**0.5
    student = Estimate(mean, stderr, num_samples=num_samples)
    outer = Estimate(mean, stderr, num_samples=num_samples, skewness=skewness)
    quantile = float(t.ppf(0.975, num_samples - 1))
    hall = mean - stderr * outer._hall(quantile), mean - stderr * outer._hall(-quantile)
    intervals = (student.interval(), hall, outer.interval())
    first, second, third = (float(((low <= truth) & (truth <= high)).double().mean()) for low, high in intervals)
    return first, second, third


if __name__ == "__main__":
    main()
