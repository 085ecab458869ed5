"""Style of all figures, for matplotlib and plotly: palette, markers and dashes of series, fonts and grids."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

# Okabe and Ito's palette for color-blind readers, without yellow, which is too pale on white.
COLORS = BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
)
INK, GREY, PALE, GRID = "#1D2125", "#555555", "#9AA0A6", "#DDDDDD"
MARKERS = "os^DvPX<>"
DASHES: Mapping[str, str] = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}  # plotly's names
THIN, WIDE = 1.0, 1.8  # points
rc = matplotlib.rc
rc("font", size=11)
rc("text", color=INK)
rc("figure", dpi=110)
rc("grid", color=GRID, linewidth=0.8)
rc("legend", frameon=False, fontsize=10.5)
rc("lines", linewidth=WIDE, markersize=5.5, markeredgecolor="white", markeredgewidth=0.6)
rc("lines", scale_dashes=False, dashed_pattern=(8, 4))
rc("axes", titlesize=13, titleweight="bold", titlelocation="left", labelcolor=INK, grid=True, axisbelow=True)
rc("axes.formatter", useoffset=False)
rc("axes.spines", top=False, right=False)
AXIS = {"gridcolor": GRID, "linecolor": GREY, "showline": True, "zeroline": False}
FONT = {"family": "system-ui, sans-serif", "size": 12, "color": INK}
PLOTLY = {"layout": {"font": FONT, "plot_bgcolor": "white", "xaxis": AXIS, "yaxis": AXIS}}


def looks(series: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Returns color, marker and dash of each series from its settings.

    Settings with the most values share the colors; each combination of the others has a marker and a dash.
    """
    columns = sorted(zip(*series, strict=True), key=lambda column: -len(set(column)))
    hues: list[tuple[str, ...]] = [()] * len(series)
    forms = list(hues)
    for place, column in enumerate(columns):
        finer = [(*hue, value) for hue, value in zip(hues, column, strict=True)]
        if place == 0 or len(set(finer)) <= len(COLORS):
            hues = finer
        else:
            forms = [(*form, value) for form, value in zip(forms, column, strict=True)]
    all_hues, all_forms = (list(dict.fromkeys(keys)) for keys in (hues, forms))
    out = []
    for hue, form in zip(map(all_hues.index, hues), map(all_forms.index, forms), strict=True):
        shape = form + len(all_forms) * (hue // len(COLORS))
        dash = list(DASHES)[shape % len(DASHES)]
        marker = MARKERS[(shape if len(all_forms) > 1 else hue) % len(MARKERS)]
        out.append({"color": COLORS[hue % len(COLORS)], "marker": marker, "linestyle": dash})
    return out
