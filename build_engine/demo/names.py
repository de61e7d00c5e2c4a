"""Names: real cities in three lists, and made-up ones built from the same word pieces.

Invariant: a name counts as held out by its spelling alone (a list, or a hash), so no training sample can hold one.
A made-up name is kept only when the vocabulary cuts it, with and without a space before it, into pieces of the
pool.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from gptoss_trt.build_engine.demo.codec import Codec

# Cities whose tokens with a space before them ("weather in X") and without one ('"city":"X"') differ in any way: they
# are learnt one by one and never held out.
KNOWN_CITIES = tuple(
    (  # noqa: SIM905
        "Amsterdam Athens Atlanta Auckland Baghdad Bangkok Barcelona Basel Beijing Berlin Bern Boston "
        "Brussels Budapest "
        "Cairo Chicago Cologne Copenhagen Dallas Delhi Denver Detroit Dubai Dublin Edinburgh Florence Frankfurt Geneva "
        "Glasgow Hamburg Hanoi Helsinki Houston Istanbul Jakarta Jerusalem Karachi Kyiv Kyoto Lagos Leipzig "
        "Lima Lisbon "
        "Liverpool London Lyon Madrid Manchester Manila Marseille Melbourne Miami Milan Montreal Moscow Mumbai Munich "
        "Nairobi Naples Nice Osaka Oslo Ottawa Oxford Palermo Paris Perth Philadelphia Phoenix Porto Prague Rome "
        "Rotterdam Salzburg Santiago Seattle Seoul Shanghai Singapore Sofia Stockholm Stuttgart Sydney Taipei Tehran "
        "Tokyo Toronto Turin Vancouver Venice Verona Vienna Warsaw Zagreb Zurich"
    ).split()
)

# Cities that the vocabulary cuts alike with and without a space: 59 are held out.
CUT_CITIES = tuple(
    (  # noqa: SIM905
        "Abadan Abidjan Abilene Acapulco Accra Adana Agadir Agra Ajaccio Aleppo Algiers Almaty Amman Amritsar Ancona "
        "Andorra Angers Annecy Aosta Arles Ashgabat Astana Asuncion Aswan Avignon Badajoz Baku Bangui Banjul Basra "
        "Belgrade Belmopan Bhopal Bissau Blackpool Bogota Brindisi Brno Busan Cadiz Caen Cagliari Calais Catania "
        "Conakry Cordoba Cusco Debrecen Dhaka Dili Djibouti Dodoma Dushanbe Erfurt Ferrara Foggia Freetown Fukuoka "
        "Funchal Gaborone Gdansk Gdynia Ghent Gitega Guayaquil Haifa Harare Harbin Hargeisa Herat Honiara Ibadan "
        "Incheon Isfahan Izmir Jeddah Jena Juba Kandy Kanpur Katowice Kaunas Kelowna Khartoum Kinshasa Konya Kosice "
        "Libreville Lilongwe Limoges Lome Luanda Lublin Lucca Lucerne Luxor Lviv Madurai Malabo Malmo Manama Manaus "
        "Mantua Maputo Marburg Maribor Matera Mbabane Medan Messina Modena Mombasa Monrovia Montevideo Moroni Mosul "
        "Muscat Nagoya Nagpur Namur Napier Narvik Neuss Niamey Nicosia Novara Odense Olbia Oporto Oran Oulu Oviedo "
        "Padua Pamplona Patna Patras Pavia Peoria Perugia Pescara Peshawar Plovdiv Podgorica Poitiers Poznan Pristina "
        "Regensburg Reims Rouen Salerno Salford Samara Samarkand Sanaa Sapporo Segovia Sendai Seville Skopje Sochi "
        "Sucre Surabaya Suva Tangier Taranto Tartu Tashkent Tbilisi Tijuana Trento Trieste Tripoli Turku Udine Uppsala "
        "Vaduz Varna Vicenza Vilnius Volgograd Windhoek Wroclaw Wuppertal Yaounde Yerevan Zadar"
    ).split()
)
HELD_OUT_CITIES = tuple(city for city in CUT_CITIES[1::3][:60] if city != "Accra")  # facts name it as a capital
FIRST_NAMES = tuple(
    (  # noqa: SIM905
        "Alice Anna Ben Bob Carl Carol Clara David Emma Eva Frank George Henry Jack James Jane John Julia Kate Laura "
        "Leo Lucy Maria Mark Martin Max Mary Nina Oliver Paul Peter Robert Rosa Sam Sarah Simon Sophie Tom Victor "
        "William"
    ).split()
)


def hash_share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return zlib.crc32(text.encode("utf-8")) / 2**32


def is_held_out(name: str) -> bool:
    """Whether a name may stand only in held-out samples."""
    if name in HELD_OUT_CITIES:
        return True
    known = name in KNOWN_CITIES or name in CUT_CITIES or name in FIRST_NAMES
    return not known and hash_share(f"name {name}") < 0.1


@dataclass(frozen=True)
class NamePool:
    """First pieces (with both forms in the vocabulary) and continuations that made-up names are built from."""

    firsts: tuple[str, ...]
    tails: tuple[str, ...]
    codec: Codec

    @classmethod
    def build(cls, codec: Codec) -> NamePool:
        """Takes the pieces of CUT_CITIES. Raises ValueError for a city that the vocabulary cuts in two ways."""
        firsts: dict[str, None] = {}
        tails: dict[str, None] = {}
        for city in CUT_CITIES:
            bare, spaced = codec.pieces(city), codec.pieces(" " + city)
            if [" " + bare[0], *bare[1:]] != spaced:
                raise ValueError(f"{city} is {bare} without and {spaced} with a space before it")
            firsts[bare[0]] = None
            tails.update(dict.fromkeys(bare[1:]))
        return cls(tuple(firsts), tuple(tails), codec)

    def make(self, rng: random.Random) -> str:
        """A made-up name of two to four pieces."""
        while True:
            count = rng.choice((1, 1, 2, 2, 2, 3))
            parts = [rng.choice(self.firsts), *(rng.choice(self.tails) for _ in range(count))]
            name = "".join(parts)
            if not 3 <= len(name) <= 14:
                continue
            if self.codec.pieces(name) == parts and self.codec.pieces(" " + name) == [" " + parts[0], *parts[1:]]:
                return name
