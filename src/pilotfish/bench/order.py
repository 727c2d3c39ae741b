"""The order in which arms take their turns, so that a machine that drifts touches all of them alike."""

from __future__ import annotations


def balanced_order(num_arms: int, num_rounds: int) -> list[list[int]]:
    """For each round the arms, as numbers from 0, in the order in which they run.

    Every second round is the round before it in reverse, which takes a steady drift out of any pair of arms. The
    others are rows of a Latin square of Williams (Aust. J. Sci. Res. A 2, 1949): over `num_arms` rounds, twice as many
    where that is odd, each arm stands equally often in each place and equally often behind each other arm. Two arms
    give ABBA BAAB. Arm 0 comes first.
    """
    # 0, 1, n - 1, 2, n - 2, …: neighbours differ by something else each time.
    sequence = [0, *((place + 1) // 2 if place % 2 else num_arms - place // 2 for place in range(1, num_arms))]
    rounds: list[list[int]] = []
    for index in range(num_rounds):
        row = [(arm + index // 2) % num_arms for arm in sequence]
        rounds.append(row if index % 2 == 0 else row[::-1])
    return rounds
