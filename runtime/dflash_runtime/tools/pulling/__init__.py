"""``dflash-moe pull`` and ``rm``: model files from the hub into the cache of its library, and out.

`pull` decides, `hub` asks, `transfer` fetches a file, `watched` keeps deadlines, `removal` removes.
"""
