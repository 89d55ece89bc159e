"""Models by name: how names are read, and which model files of this machine they stand for.

A name is looked for in the hub's cache, where ``dflash-moe pull`` puts files too, and in the
folders of LM Studio and Ollama. Nothing here uses the network.
"""
