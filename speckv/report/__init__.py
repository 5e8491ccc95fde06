"""Results that one can look at: one self-contained page, and the same pictures as files.

`evidence` loads what a result was made from, `heldout` replays some of its policies on prompts that they have not seen,
`page` makes the page of it, and `plots` the pictures. `frame` is what pages are set in.
"""
