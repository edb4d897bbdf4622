"""What the tests of Slapo intend, each as a test of this package, in words and code of its own.

Read from https://github.com/awslabs/slapo, ``tests/``, all seventeen files. An intention is one thing that a test asks
for: a parametrized test here has one a case, where its docstring says so. "Holds" means by the primitives of this
package, where the call is often another one (``find`` needs no ``decompose`` before, a graph no class of its own).

=====================================  ==========  =====  ===================================================
file there                             intentions  hold   do not
=====================================  ==========  =====  ===================================================
subgraph, utils                        14          14
replace                                27          26     calls with plain numbers
fusion, op, checkpoint, annotate,      16          16
verify (one process)
trace, pipeline_partition              27          25     the topology of DeepSpeed's pipelines, twice
random (one process)                   6           6
annotate, consolidation, shard,        32          32
reshard, shard_sync_op (two ranks)
checkpoint, fork_rng, random, verify,  13          13
end2end (two ranks)
=====================================  ==========  =====  ===================================================

Those on two ranks are slow, and so are those that compile or need a model of transformers::

    pytest tests/peers/slapo
"""
