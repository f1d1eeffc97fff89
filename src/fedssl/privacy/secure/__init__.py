"""Secure sums: a server learns the sum of its clients' vectors and no single one of them.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", in the
variant for an active adversary: a server that does not keep to the protocol, together with fewer
than ``2 · threshold − n`` of the ``n`` clients. A sum takes five steps (``STEPS``), each a message
to the clients and their replies; a client that misses a step, or answers it wrongly, is out:

keys
    Each client makes two X25519 key pairs: one for talking to a peer past the server, one that its
    pairwise masks come from. It signs the public keys with its identity (``identity.py``).
shares
    Each client checks the signatures. Then it shares two secrets among all, so that ``threshold``
    of them can rebuild either: the seed of its self mask, and the secret that its mask key pair
    derives from. A mark of each share lets the server recognize a false one later.
masked
    Each client sends its vector plus its self mask, plus or minus a mask that it has in common with
    each peer; the latter cancel in the sum.
agree
    The server names those whose vectors came, the survivors. Each client signs the list, once.
unmask
    Each client checks that at least ``threshold`` clients signed the list that it signed. Then it
    tells its shares of the survivors' self masks, and of the mask keys of the others, never both of
    one: with both, that client's vector is naked.

A client that sends a false vector spoils the sum, since nobody may look at its part alone. One
number more in each vector, a 1, shows masks that did not cancel (:class:`Spoiled`).
"""

from fedssl.privacy.secure.masker import Masker
from fedssl.privacy.secure.masks import STEPS, Message
from fedssl.privacy.secure.unmasker import NotEnough, Spoiled, SumLost, Unmasker
from fedssl.privacy.secure.vector import Vector, decode, encode, size

__all__ = [
    "STEPS",
    "Masker",
    "Message",
    "NotEnough",
    "Spoiled",
    "SumLost",
    "Unmasker",
    "Vector",
    "decode",
    "encode",
    "size",
]
