"""The colours of figures."""

TEXT = "#0f172a"
MUTED = "#64748b"  # the text of axes, hosts and notes
FRAME = "#94a3b8"  # around hosts
BACKGROUND = "#ffffff"
PANEL = "#f8fafc"
PANEL_FRAME = "#e2e8f0"

GROUPS = (
    *("#a5dbff", "#ffbfbb", "#a3e6c1", "#dac9ff", "#f5cd95", "#90e4f5", "#ffbedc", "#c5dfa3", "#b9d4ff", "#ffc3a8"),
    *("#bef1e6", "#f4dafd", "#f0e5bc", "#c1ecff", "#ffd6dc", "#cdefd0", "#e0e0ff", "#ffddc0", "#baf0f3", "#fed7f2"),
    *("#bbc671", "#8ac2ff", "#fca393", "#6fd5b0", "#ceacf7", "#e0b767", "#60ceef", "#f7a0be", "#9fce86", "#a6b9ff"),
)
"""Colours of groups: OKLCH hues that advance by the golden angle from 245 degrees, and another shade on each line.

The lines have lightness 0.87, 0.92 and 0.80. Black text can be read on each colour, and neighbours differ clearly."""


def colour(number: int) -> str:
    """The colour of a group. Colours repeat after 30 groups.

    >>> colour(0), colour(1)
    ('#a5dbff', '#ffbfbb')
    """
    return GROUPS[number % len(GROUPS)]
