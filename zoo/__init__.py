"""Models and their sharding rules: see README.md."""

import pkgutil

# A folder `zoo` of one's own that is no package keeps its modules, though this one is installed.
__path__ = pkgutil.extend_path(__path__, __name__)
