"""Conversions between meshes and the mesh types of torch, Megatron-Core and ColossalAI."""

from pgmesh.interop.device_mesh import from_device_mesh

__all__ = ["from_device_mesh"]
