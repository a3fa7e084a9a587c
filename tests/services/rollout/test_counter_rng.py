import torch

from services.rollout.sglang_plugin.counter_rng import uniforms

MASK = (1 << 64) - 1


def reference(seed, position, stream=0):
    """The same generator in Python's integers."""

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    key = mix((seed + stream * 0xD1B54A32D192ED03) & MASK)
    return (mix((key + (position + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


def test_equals_the_reference():
    seeds = torch.tensor([0, 1, 2**63 - 1, 123456789])
    positions = torch.tensor([0, 5, 2047, 77])
    for stream in (0, 1, 7):
        expected = [reference(s, p, stream) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
        assert uniforms(seeds, positions, stream).tolist() == expected


def test_is_uniform_over_positions_and_over_neighbouring_seeds():
    count, bins = 100_000, 50
    numbers = torch.arange(count)
    for u in (
        uniforms(torch.zeros(1, dtype=torch.int64), numbers),
        uniforms(numbers, torch.tensor([17])),
        uniforms(torch.tensor([3]), numbers, stream=2),
    ):
        observed = torch.histc(u.float(), bins, 0, 1)
        chi2 = float(((observed - count / bins) ** 2 / (count / bins)).sum())
        assert chi2 < 101  # the 2e-5 tail at 49 degrees of freedom


def test_streams_and_successive_positions_are_not_correlated():
    numbers = torch.arange(100_000)
    seed = torch.tensor([5])
    first = uniforms(seed, numbers)
    for other in (uniforms(seed, numbers, stream=1), uniforms(seed, numbers + 1), uniforms(seed + 1, numbers)):
        correlation = float(torch.corrcoef(torch.stack([first, other]))[0, 1])
        assert abs(correlation) < 0.015  # more than four standard errors
