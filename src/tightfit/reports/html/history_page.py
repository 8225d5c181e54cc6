"""A history as one HTML page that needs nothing else: no network, no server, no other file.

The page is the template `page/history.html` with the styles, the scripts and the data put in. Its policy lets it load nothing and run only the
script that is in it; the data is a JSON block in which nothing can end the block; what the script shows it sets as text, never as markup.
"""

import os

from tightfit.reports.html.assets import content_policy, script, styles
from tightfit.reports.html.page_data import page_json
from tightfit.reports.html.step_chart import step_chart
from tightfit.reports.html.templates import render
from tightfit.reports.summary import Summary
from tightfit.simulate.history import History

# In the order in which they need each other.
_SCRIPTS = (
    "data.js",
    "palette.js",
    "timeline_buckets.js",
    "timeline_view.js",
    "timeline_plot.js",
    "timeline_bands.js",
    "timeline_axes.js",
    "timeline_overview.js",
    "timeline_moves.js",
    "timeline_keys.js",
    "timeline_pointer.js",
    "timeline_words.js",
    "legend.js",
    "timeline.js",
    "treemap.js",
    "table_rows.js",
    "table.js",
    "figures.js",
    "main.js",
)
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def html_page(history: History, summary: Summary) -> str:
    """The whole page, under 3 MB however long the run is."""
    tracks = history.step_tracks
    page_styles, page_script = styles("page.css", "step.css"), script(*_SCRIPTS)
    return render(
        "history.html",
        title=f"{os.path.basename(summary.label)}: memory report",
        policy=content_policy(styles=page_styles, script=page_script),
        styles=page_styles,
        script=page_script,
        data=_json_in_a_block(page_json(history, summary)),
        step=None if tracks is None else step_chart(tracks),
        step_seconds=0.0 if tracks is None else tracks.seconds,
    )


def _json_in_a_block(text: str) -> str:
    """JSON without the characters that could end the block it stands in or open another; its values stay the same."""
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text
