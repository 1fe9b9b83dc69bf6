"""Molecules as graphs, by RDKit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import GraphFilterError, needs, shown

# the values of the features of an atom and a bond, in OGB's order; all other values share the last number
CHIRALITY = ("CHI_UNSPECIFIED", "CHI_TETRAHEDRAL_CW", "CHI_TETRAHEDRAL_CCW", "CHI_OTHER")
HYBRIDIZATION = ("SP", "SP2", "SP3", "SP3D", "SP3D2")
BOND = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")
STEREO = ("STEREONONE", "STEREOZ", "STEREOE", "STEREOCIS", "STEREOTRANS", "STEREOANY")


def from_smiles(smiles: str) -> dict[str, Any]:
    """Return a molecule as a graph of its heavy atoms, with the features of the Open Graph Benchmark.

    ``GraphormerConfig()`` has embeddings for them. An atom has its atomic number, chirality, degree, charge, numbers of
    hydrogens and of radical electrons, hybridization, whether it is aromatic, and whether it is in a ring. A bond has
    its type, its stereo configuration, and whether it is conjugated.

    Args:
        smiles: The molecule in SMILES.

    Returns:
        ``node_features`` (atoms, 9), ``edge_index`` (2, edges) with each bond in both directions, and ``edge_features``
        (edges, 3).

    Raises:
        GraphFilterError: RDKit is missing (``pip install 'hf-graphfilter[graphs]'``), cannot read the text, or finds no
            atoms in it.

    Example:
        >>> graph = from_smiles("CCO")
        >>> graph["node_features"][:, 0].tolist(), graph["edge_index"].tolist()
        ([5, 5, 7], [[0, 1, 1, 2], [1, 0, 2, 1]])
    """
    with needs("graphs", "from_smiles"):
        from rdkit import Chem

    molecule = None
    if isinstance(smiles, str):
        with silence_rdkit(), contextlib.suppress(UnicodeError):  # RDKit takes UTF-8 only
            molecule = Chem.MolFromSmiles(smiles)
    if molecule is None or not molecule.GetNumAtoms():
        raise GraphFilterError(f"RDKit reads no molecule from {shown(smiles)}: correct the SMILES or leave it out")
    bonds = [(b.GetBeginAtomIdx(), b.GetEndAtomIdx(), _bond_features(b)) for b in molecule.GetBonds()]
    edges = [edge for a, b, features in bonds for edge in ((a, b, features), (b, a, features))]
    return {
        "node_features": np.array([_atom_features(atom) for atom in molecule.GetAtoms()]),
        "edge_index": np.array([(a, b) for a, b, _ in edges], dtype=np.int64).reshape(-1, 2).T,
        "edge_features": np.array([features for *_, features in edges], dtype=np.int64).reshape(-1, 3),
    }


def _atom_features(atom: Any) -> list[int]:
    return [
        _find_index(atom.GetAtomicNum(), range(1, 119)),
        _find_index(str(atom.GetChiralTag()), CHIRALITY),
        _find_index(atom.GetTotalDegree(), range(11)),
        _find_index(atom.GetFormalCharge(), range(-5, 6)),
        _find_index(atom.GetTotalNumHs(), range(9)),
        _find_index(atom.GetNumRadicalElectrons(), range(5)),
        _find_index(str(atom.GetHybridization()), HYBRIDIZATION),
        int(atom.GetIsAromatic()),
        int(atom.IsInRing()),
    ]


def _bond_features(bond: Any) -> list[int]:
    stereo = str(bond.GetStereo())
    return [_find_index(str(bond.GetBondType()), BOND), _find_index(stereo, STEREO[:-1]), int(bond.GetIsConjugated())]


def _find_index(value: Any, values: Sequence[Any]) -> int:
    return values.index(value) if value in values else len(values)


@contextlib.contextmanager
def silence_rdkit() -> Iterator[None]:
    """Keep RDKit from printing why it cannot read a molecule, which the error says."""
    from rdkit.rdBase import BlockLogs

    with BlockLogs():  # which leaves the user's own settings as they were
        yield
