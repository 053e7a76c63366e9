"""The papers' searchers, by the names under which commands and `search` find them."""

from cohabit.planner.parts import Part, Parts

_HERE = "cohabit.planner.papers"
PARTS: Parts = {
    "cohabit.searchers": {
        "swapadvisor": Part(f"{_HERE}.swapadvisor.searcher:SwapAdvisor"),
        "particle_swarm": Part(f"{_HERE}.home.particle_swarm:ParticleSwarm"),
        "greedy": Part(f"{_HERE}.beaumont.searcher:Greedy"),
        "dynprog": Part(f"{_HERE}.beaumont.searcher:DynProg"),
        "interval": Part(f"{_HERE}.tensile.searcher:Tensile"),
        "on_demand": Part(f"{_HERE}.swapadvisor.on_demand:OnDemand"),
    },
    "cohabit.baselines": {
        "vdnn": Part(f"{_HERE}.baselines.layers:Vdnn"),
        "vdnn_conv": Part(f"{_HERE}.baselines.layers:VdnnConv"),
        "superneurons": Part(f"{_HERE}.baselines.layers:SuperNeurons"),
        "tflms": Part(f"{_HERE}.baselines.layers:Tflms"),
        "autoswap": Part(f"{_HERE}.baselines.scores:AutoSwap"),
        "capuchin": Part(f"{_HERE}.baselines.scores:Capuchin"),
        "sqrt_checkpointing": Part(f"{_HERE}.baselines.checkpointing:SqrtCheckpointing"),
        "chain_checkpointing": Part(f"{_HERE}.baselines.checkpointing:ChainCheckpointing"),
    },
}
