"""True statements: common knowledge after a long text; is the word that makes a statement true likelier than its rival?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sinklab.corpora.base import Identity
from sinklab.registry import tasks
from sinklab.tasks._writing import Pair, StatementTask

__all__ = ["TrueStatements"]

PAIRS = (
    Pair("Ice is", "Fire is", " cold", " hot"),
    Pair("Snow is", "Coal is", " white", " black"),
    Pair("The sky is", "The grass is", " blue", " green"),
    Pair("A stone is", "A pillow is", " hard", " soft"),
    Pair("An elephant is", "A mouse is", " big", " small"),
    Pair("A turtle is", "A rabbit is", " slow", " fast"),
    Pair("Sugar is", "A lemon is", " sweet", " sour"),
    Pair("At night it is", "At noon it is", " dark", " bright"),
    Pair("A feather is", "A brick is", " light", " heavy"),
    Pair("A baby is", "A grandfather is", " young", " old"),
    Pair("The sea is", "A desert is", " wet", " dry"),
    Pair("A bird can", "A fish can", " fly", " swim"),
    Pair("A cow says", "A cat says", " moo", " meow"),
    Pair("A dog says", "A duck says", " woof", " quack"),
    Pair("We see with our", "We hear with our", " eyes", " ears"),
    Pair("We walk on our", "We write with our", " feet", " hands"),
    Pair("The sun shines in the", "The moon shines in the", " day", " night"),
    Pair("We can eat", "We can drink", " bread", " milk"),
    Pair("Birds live in a", "Bees live in a", " nest", " hive"),
    Pair("A banana is", "A cherry is", " yellow", " red"),
    Pair("A king is a", "A queen is a", " man", " woman"),
    Pair("A brother is a", "A sister is a", " boy", " girl"),
    Pair("In winter it is", "In summer it is", " cold", " warm"),
    Pair("A mountain is", "A valley is", " high", " low"),
    Pair("A giant is", "A dwarf is", " tall", " short"),
    Pair("Thunder is", "A whisper is", " loud", " quiet"),
    Pair("A knife is", "A ball is", " sharp", " round"),
    Pair("We sleep in a", "We sit on a", " bed", " chair"),
    Pair("A car drives on the", "A boat sails on the", " road", " water"),
    Pair("A plane flies in the", "A train runs on the", " air", " rails"),
    Pair("We cut bread with a", "We sweep the floor with a", " knife", " broom"),
    Pair("We open a door with a", "We hit a nail with a", " key", " hammer"),
    Pair("A doctor works in a", "A teacher works in a", " hospital", " school"),
    Pair("Books are made of", "Windows are made of", " paper", " glass"),
    Pair("A table is made of", "A coin is made of", " wood", " metal"),
    Pair("Cows eat", "Lions eat", " grass", " meat"),
    Pair("Milk comes from a", "Eggs come from a", " cow", " hen"),
    Pair("Wool comes from a", "Honey comes from a", " sheep", " bee"),
    Pair("After Monday comes", "After Friday comes", " Tuesday", " Saturday"),
    Pair("We have breakfast in the", "We have dinner in the", " morning", " evening"),
    Pair("One and one is", "Two and two is", " two", " four"),
    Pair("The opposite of up is", "The opposite of left is", " down", " right"),
    Pair("The opposite of yes is", "The opposite of in is", " no", " out"),
    Pair("A bird has", "A fish has", " wings", " fins"),
    Pair("A bike has two", "A shirt has two", " wheels", " sleeves"),
    Pair("Rain falls from the", "Apples fall from the", " clouds", " tree"),
    Pair("A happy child", "A sad child", " laughs", " cries"),
    Pair("When you are tired, you", "When you are hungry, you", " sleep", " eat"),
    Pair("When you are thirsty, you", "When you are dirty, you", " drink", " wash"),
    Pair("A farmer works on a", "A sailor works on a", " farm", " ship"),
    Pair("A baker makes", "A tailor makes", " bread", " clothes"),
    Pair("A puppy is a young", "A kitten is a young", " dog", " cat"),
    Pair("A lamb is a young", "A calf is a young", " sheep", " cow"),
    Pair("Blood is", "Milk is", " red", " white"),
    Pair("Carrots are", "Peas are", " orange", " green"),
    Pair("You can read a", "You can sing a", " book", " song"),
    Pair("You wear shoes on your", "You wear a hat on your", " feet", " head"),
    Pair("You wear gloves on your", "You wear a scarf around your", " hands", " neck"),
    Pair("A clock shows the", "A map shows the", " time", " way"),
    Pair("A fridge makes food", "A stove makes food", " cold", " hot"),
    Pair("Stars are in the", "Whales are in the", " sky", " sea"),
    Pair("Paris is in", "Rome is in", " France", " Italy"),
    Pair("Tokyo is in", "Cairo is in", " Japan", " Egypt"),
    Pair("An oak is a", "A salmon is a", " tree", " fish"),
)


@tasks.register("true_statements")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrueStatements(StatementTask):
    """A beginning such as ``Ice is`` and two words, ``cold`` and ``hot``, one of which makes it true.

    In the manner of TruthfulQA (Lin et al. 2022, arXiv 2109.07958), with common knowledge in place of misconceptions: 64 pairs
    of statements, written for this task, in which the true word of one is the false word of the other. So a model that likes
    one word better whatever stands before it is right in half of the cases. The two words are compared at the first token in
    which they differ. Nothing in the text before the statement helps: what is lost without a sink is lost from what the
    model knows. Without that knowledge a model is at chance, and the task says nothing.

    Args:
        corpus: the text before the statement: a name, a text file or a folder.
        lengths: tokens before the answer, in budgets, for each of the two statements of a pair.
    """

    @property
    def identity(self) -> Identity:
        return Identity(source=f"{len(PAIRS)} pairs of statements of sinklab", revision="1", licence="Apache-2.0")

    @property
    def pairs(self) -> Sequence[Pair]:
        return PAIRS
