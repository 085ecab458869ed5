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
matplotlib.rcParams.update(
    {
        "font.size": 11,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.titlesize": 13,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "lines.linewidth": WIDE,
        "lines.markersize": 5.5,
        "lines.markeredgecolor": "white",
        "lines.markeredgewidth": 0.6,
        "lines.scale_dashes": False,
        "lines.dashed_pattern": (8, 4),
        "legend.frameon": False,
        "legend.fontsize": 10.5,
        "figure.dpi": 110,
    }
)
PLOTLY: Mapping[str, Any] = {
    "layout": {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "plot_bgcolor": "white",
        "xaxis": {"gridcolor": GRID, "linecolor": GREY, "showline": True, "zeroline": False},
        "yaxis": {"gridcolor": GRID, "linecolor": GREY, "showline": True, "zeroline": False},
    }
}


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
