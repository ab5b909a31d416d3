"""To and from what others call a mesh."""

from pgmesh.interop.device_mesh import from_device_mesh

__all__ = ["from_device_mesh"]
