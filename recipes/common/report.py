"""The public place of `describe`; its code is in recipes/common/analysis/own_module.py."""

from recipes.common.analysis.own_module import describe as describe
