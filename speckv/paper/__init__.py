"""The SpecKV paper (Shikhar Shukla, arXiv 2605.02888), checked against the data that its author published.

`data` reads that data, `protocol` follows the paper, `honest` asks what the protocol hides, `study` repeats the paper's
study on a recording of ours, and `report` puts the four beside each other. `tables` and `plots` show them; `page` tells
the story around them, as Markdown and, in `webpage`, as HTML.
"""
