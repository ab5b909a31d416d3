"""Use of meshes with torch's DeviceMesh, Megatron-Core and ColossalAI."""

from pgmesh.interop.device_mesh import from_device_mesh

__all__ = ["from_device_mesh"]
