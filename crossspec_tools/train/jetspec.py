"""JetSpec: DFlash whose blocks are causal, which the recipe says."""

from crossspec_tools.train.dflash import train_dflash

train_jetspec = train_dflash
