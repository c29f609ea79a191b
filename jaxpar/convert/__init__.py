"""Published models in and out: `python -m jaxpar.convert`; a folder straight onto a mesh.

layout        the language of the tables          families      a table for each family
hf_config     config.json                         hf_folder     tensors, found and checked
importing     from-hf                             exporting     to-hf
mesh_load     a published folder onto a mesh      selfcheck     the same logits?
"""
