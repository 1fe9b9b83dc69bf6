"""From graphs and molecules to the inputs of ``GraphormerModel``.

    from hf_graphfilter.graphs import GraphCollator, GraphDataset, from_smiles, prepare_graph

``GraphCollator(config)`` makes a batch from dictionaries, PyTorch Geometric's ``Data`` or OGB's graphs.
``prepare_graph`` finds the shortest paths of one graph, so that ``datasets.map`` can cache them.
"""

from .collator import GraphCollator
from .dataset import GraphDataset
from .molecules import from_smiles
from .paths import prepare_graph

__all__ = ["GraphCollator", "GraphDataset", "from_smiles", "prepare_graph"]
