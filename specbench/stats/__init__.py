"""Definitions of derived numbers: a `Number` for each, with the definition that is printed under tables.

`rows` are stored sample rows with status "ok" (see `specbench.store.schema.SAMPLES`) after `condense`, which sums lists
by token over each image. A number that cannot be computed is None, never 0. Token statistics cover free positions only,
not tokens forced by the grammar.
"""

from specbench.stats.drafts import *  # noqa: F403
from specbench.stats.intervals import *  # noqa: F403
from specbench.stats.means import *  # noqa: F403
from specbench.stats.numbers import *  # noqa: F403
from specbench.stats.speed import *  # noqa: F403
from specbench.stats.tokens import *  # noqa: F403
