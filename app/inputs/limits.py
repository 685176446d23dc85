"""What a profile says of the longest clips and the largest batches that fit, for a person."""

from __future__ import annotations

from actors.plan.costs.profile import Profile


def longest_clips(profile: Profile) -> list[str]:
    """One line per size of pictures at which the DiT ran out of memory with one clip: the most frames by degree."""
    sizes: dict[tuple[int, int], dict[int, int]] = {}
    for limit in profile.max_frames:
        if limit.module == "dit" and limit.batch == 1:
            of = sizes.setdefault((limit.height, limit.width), {})
            of[limit.degree] = min(limit.frames, of.get(limit.degree, limit.frames))
    lines = []
    for (height, width), of in sorted(sizes.items()):
        told = [
            f"{_longest(profile, height, width, degree, most)} at degree {degree}"
            for degree, most in sorted(of.items())
        ]
        lines.append(f"longest clip of {height}x{width} that fits: {', '.join(told)}")
    return lines


def largest_batches(profile: Profile) -> list[str]:
    """One line per bucket of which a batch of several clips ran out of memory: the most clips by degree."""
    buckets: dict[tuple[int, int, int], dict[int, int]] = {}
    for limit in profile.max_frames:
        if limit.module == "dit" and limit.batch > 1:
            of = buckets.setdefault((limit.frames + 1, limit.height, limit.width), {})
            of[limit.degree] = min(limit.batch, of.get(limit.degree, limit.batch))
    return [
        f"largest batch of {frames}f {height}x{width} that fits: "
        + ", ".join(
            f"{_largest(profile, (frames, height, width, degree), failed)} (not {failed}) at degree {degree}"
            for degree, failed in sorted(of.items())
        )
        for (frames, height, width), of in sorted(buckets.items())
    ]


def _largest(profile: Profile, place: tuple[int, int, int, int], failed: int) -> int:
    """The largest batch that ran below the first that did not."""
    batches = (key[1] for key in profile.measured if key[0] == "dit" and key[2:] == place)
    return max((batch for batch in batches if batch < failed), default=0)


def _longest(profile: Profile, height: int, width: int, degree: int, most: int) -> str:
    """The longest that ran below the first that did not."""
    ran = [
        key[2]
        for key in profile.measured
        if key[:2] == ("dit", 1) and key[3:] == (height, width, degree) and key[2] <= most
    ]
    if not ran:
        return f"none of {most + 1} frames"
    return f"{max(ran)} frames ({profile.tokens(max(ran), height, width):,} tokens; not {most + 1})"
