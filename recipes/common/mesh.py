"""The public place of `make_mesh`; its code is in recipes/common/runtime/mesh.py."""

from recipes.common.runtime.mesh import make_mesh as make_mesh
