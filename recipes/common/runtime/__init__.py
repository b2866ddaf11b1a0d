"""The environment of a run: flags, devices, processes, signals, the terminal."""

from recipes.common.runtime.errors import Stopped, UserError
from recipes.common.runtime.flags import Devices, Run, flag
from recipes.common.runtime.mesh import describe, make_mesh
from recipes.common.runtime.terminal import print0, quote, warn
