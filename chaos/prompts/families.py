"""What the passages are about: families of subjects, the slots a question may ask for, their values.

Each slot has three wordings of its statement and three of its question. `{s}` is the subject, `{v}` the
value. Everything here is invented.
"""

from __future__ import annotations

import msgspec


class Slot(msgspec.Struct, frozen=True):
    """One fact of a family: three statements, three questions, and the values it takes.

    A slot without questions only fills passages: SmolLM2-135M answers it too rarely.
    """

    statements: tuple[str, str, str]
    questions: tuple[str, ...]
    values: tuple[str, ...]


class Family(msgspec.Struct, frozen=True):
    """Subjects of one sort. `names` are the subjects, `intros` opening sentences without a fact."""

    names: tuple[str, ...]
    intros: tuple[str, str, str]
    slots: dict[str, Slot]

    @property
    def asked(self) -> tuple[str, ...]:
        """Return the slots that have questions."""
        return tuple(name for name, slot in self.slots.items() if slot.questions)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _numbers(start: int, stop: int, step: int = 1) -> tuple[str, ...]:
    return tuple(str(number) for number in range(start, stop, step))


FIRST = _words(
    "Mara, Tobias, Ingrid, Pavel, Leona, Casper, Yusuf, Amelie, Rufus, Nadia, Oskar, Helene, "
    "Dario, Selma, Victor, Bianca, Emil, Tamsin, Hugo, Clara, Felix, Irene, Jonas, Laura"
)
LAST = _words(
    "Venn, Halloway, Krantz, Delmore, Abara, Lindgren, Petrov, Arkwright, Sorel, Quist, "
    "Marlow, Benning, Castell, Draper, Everly, Falk, Greaves, Holm, Iverson, Jarrow, Keller, "
    "Lowe, Morten, Nolan"
)
PEOPLE = tuple(f"{first} {LAST[(index * 7 + 3) % len(LAST)]}" for index, first in enumerate(FIRST))
PERSONS = tuple(f"{first} {LAST[(index * 5 + 11) % len(LAST)]}" for index, first in enumerate(FIRST))
CITIES = _words(
    "Lisbon, Oslo, Vienna, Prague, Dublin, Madrid, Athens, Warsaw, Geneva, Milan, Hamburg, "
    "Bergen, Porto, Seville, Krakow, Zurich, Turin, Naples, Antwerp, Malmo, Bristol, Leeds, "
    "Lyon, Nice"
)
YEARS = _numbers(1871, 1996, 4)

PERSON = Family(
    names=PERSONS,
    intros=(
        "{s} is known to everyone on the street.",
        "This is a short note about {s}.",
        "Many neighbours have met {s}.",
    ),
    slots={
        "job": Slot(
            ("{s} works as a {v}.", "For many years {s} has worked as a {v}.", "{s} has work as a {v}."),
            (),
            _words(
                "baker, nurse, pilot, carpenter, teacher, plumber, farmer, dentist, tailor, librarian, "
                "butcher, gardener, painter, chemist, postman, lawyer, barber, welder"
            ),
        ),
        "city": Slot(
            ("{s} lives in {v}.", "For a long time {s} has lived in {v}.", "{s} lives in the city of {v}."),
            ("In which city does {s} live?", "Where does {s} live?", "Which city does {s} live in?"),
            CITIES,
        ),
        "age": Slot(
            (
                "{s} is {v} years old.",
                "{s} turned {v} years old this spring.",
                "At present {s} is {v} years old.",
            ),
            ("How old is {s}?", "What is the age of {s}?", "How many years old is {s}?"),
            _numbers(21, 80),
        ),
        "pet": Slot(
            ("{s} has a pet {v}.", "At home {s} has a pet {v}.", "For two years {s} has had a pet {v}."),
            ("What pet does {s} have?", "Which pet does {s} have?", "What kind of pet does {s} have?"),
            _words(
                "parrot, rabbit, hamster, turtle, goldfish, lizard, kitten, poodle, canary, ferret, "
                "gecko, beagle"
            ),
        ),
        "instrument": Slot(
            ("{s} plays the {v}.", "{s} plays the {v} every evening.", "On Sundays {s} plays the {v}."),
            (
                "Which instrument does {s} play?",
                "What instrument does {s} play?",
                "What musical instrument does {s} play?",
            ),
            _words(
                "piano, violin, guitar, flute, trumpet, cello, clarinet, harp, drums, organ, banjo, accordion"
            ),
        ),
    },
)

ZOO = Family(
    names=_words(
        "Biko, Tandi, Rolo, Mosi, Kesha, Bamboo, Juno, Pip, Zola, Taro, Nuri, Sable, Koda, Luma, "
        "Otto, Freya, Gus, Hazel, Indy, Milo, Olive, Rex, Suki, Willow"
    ),
    intros=(
        "{s} is a favourite of the visitors at the zoo.",
        "Visitors of the zoo like to watch {s}.",
        "The zoo has a sign with a picture of {s}.",
    ),
    slots={
        "species": Slot(
            ("{s} is a {v}.", "The animal called {s} is a {v}.", "{s} is a young {v}."),
            ("What kind of animal is {s}?", "Which animal is {s}?", "What animal is {s}?"),
            _words(
                "giraffe, tiger, zebra, lion, camel, penguin, gorilla, leopard, panda, hippo, rhino, "
                "walrus, lemur, jaguar, bison"
            ),
        ),
        "food": Slot(
            ("{s} eats {v}.", "Every morning {s} eats {v}.", "Most days {s} eats {v}."),
            (),
            _words(
                "apples, carrots, bananas, fish, melons, grapes, cabbage, beans, pumpkins, lettuce, "
                "pears, nuts"
            ),
        ),
        "keeper": Slot(
            (
                "The keeper of {s} is {v}.",
                "The name of the keeper of {s} is {v}.",
                "{v} is the keeper of {s}.",
            ),
            (),
            PEOPLE,
        ),
        "arrival": Slot(
            (
                "{s} came to the zoo in {v}.",
                "{s} arrived at the zoo in the year {v}.",
                "The zoo received {s} in {v}.",
            ),
            (
                "In which year did {s} come to the zoo?",
                "When did {s} arrive at the zoo?",
                "In what year did the zoo receive {s}?",
            ),
            _numbers(1998, 2024),
        ),
    },
)

BOOK = Family(
    names=_words(
        "The Salt Road, Winter Harbour, The Glass Orchard, A Quiet Engine, The Ninth Lantern, "
        "Paper Mountains, The Long Ferry, Copper Rain, The Hollow Bell, Seven Bridges, The Last "
        "Mill, Night Garden, The Stone Guest, River Letters, The Blue Door, Distant Thunder, The "
        "Clay Horse, Summer Ashes"
    ),
    intros=(
        "{s} is a novel that many schools read.",
        "The library has several copies of {s}.",
        "Readers often ask for {s}.",
    ),
    slots={
        "author": Slot(
            ("{s} was written by {v}.", "The author of {s} is {v}.", "{v} wrote {s}."),
            ("Who wrote {s}?", "Who is the author of {s}?", "What is the name of the author of {s}?"),
            PEOPLE,
        ),
        "year": Slot(
            (
                "{s} was first published in {v}.",
                "{s} came out in the year {v}.",
                "The first edition of {s} appeared in {v}.",
            ),
            (
                "In which year was {s} published?",
                "When was {s} first published?",
                "What year did {s} come out?",
            ),
            YEARS,
        ),
        "place": Slot(
            ("The story of {s} takes place in {v}.", "{s} is set in {v}.", "The plot of {s} is set in {v}."),
            (
                "Where is {s} set?",
                "In which city does {s} take place?",
                "Where does the story of {s} take place?",
            ),
            CITIES,
        ),
        "pages": Slot(
            ("{s} has {v} pages.", "{s} is {v} pages long.", "The print of {s} counts {v} pages."),
            ("How many pages does {s} have?", "How long is {s} in pages?", "How many pages long is {s}?"),
            _numbers(180, 640, 7),
        ),
    },
)

PRODUCT = Family(
    names=_words(
        "Velora lamp, Kintra kettle, Ombra chair, Sefton clock, Tarrow desk, Bexley heater, "
        "Nimbus fan, Corvo backpack, Alder bench, Quill printer, Fenwick radio, Lumo torch, "
        "Pallas tent, Rowan bicycle, Sondra speaker, Tiber scale, Umbra camera, Wexford mixer"
    ),
    intros=(
        "The {s} is sold in many shops.",
        "The new catalogue shows the {s}.",
        "Customers often buy the {s} as a gift.",
    ),
    slots={
        "price": Slot(
            (
                "The {s} costs {v} dollars.",
                "The price of the {s} is {v} dollars.",
                "In shops the {s} costs {v} dollars.",
            ),
            (),
            _numbers(23, 480, 11),
        ),
        "material": Slot(
            ("The {s} is made of {v}.", "The {s} is made of good {v}.", "The {s} is made mainly of {v}."),
            (
                "What is the {s} made of?",
                "Which material is the {s} made of?",
                "What material is the {s} made of?",
            ),
            _words(
                "steel, oak, glass, bamboo, copper, leather, plastic, marble, cotton, aluminium, pine, brass"
            ),
        ),
        "maker": Slot(
            (
                "The {s} is made by {v}.",
                "The maker of the {s} is {v}.",
                "The maker of the {s} is called {v}.",
            ),
            (
                "Who makes the {s}?",
                "Who is the maker of the {s}?",
                "What is the name of the maker of the {s}?",
            ),
            _words(
                "Brightwell, Harrowgate, Tollman, Ferrand, Osprey Works, Dunmore, Castleton, Ravel, "
                "Stonebridge, Merriden, Alcott, Pinewood"
            ),
        ),
        "weight": Slot(
            (
                "The {s} weighs {v} grams.",
                "The weight of the {s} is {v} grams.",
                "On the scale the {s} weighs {v} grams.",
            ),
            (),
            _numbers(210, 1900, 37),
        ),
    },
)

EVENT = Family(
    names=_words(
        "Lantern Festival, Harbour Run, Cider Fair, Kite Parade, Winter Market, Jazz Evening, "
        "Book Fair, Garden Show, Chess Open, Science Night, Boat Race, Cheese Contest, Poetry "
        "Week, Robot Show, Folk Concert, Film Weekend, Bicycle Tour, Bread Fair"
    ),
    intros=(
        "The {s} is a popular event.",
        "Tickets for the {s} sell out quickly.",
        "Families look forward to the {s}.",
    ),
    slots={
        "city": Slot(
            ("The {s} takes place in {v}.", "The {s} is held in {v}.", "{v} hosts the {s}."),
            ("Where does the {s} take place?", "In which city is the {s} held?", "Which city hosts the {s}?"),
            CITIES,
        ),
        "month": Slot(
            ("The {s} starts in {v}.", "The {s} opens every year in {v}.", "The month of the {s} is {v}."),
            (
                "In which month does the {s} start?",
                "In which month is the {s}?",
                "Which month is the month of the {s}?",
            ),
            _words(
                "January, February, March, April, May, June, July, August, September, October, November, "
                "December"
            ),
        ),
        "organiser": Slot(
            (
                "The {s} is organised by {v}.",
                "The organiser of the {s} is {v}.",
                "The {s} has been organised by {v}.",
            ),
            ("Who organises the {s}?", "Who is the organiser of the {s}?", "By whom is the {s} organised?"),
            PEOPLE,
        ),
        "visitors": Slot(
            (
                "The {s} had {v} visitors last year.",
                "Last year the {s} had {v} visitors.",
                "The {s} counted {v} visitors last year.",
            ),
            (),
            _numbers(320, 9800, 130),
        ),
    },
)

TOWN = Family(
    names=_words(
        "Ashcombe, Torvik, Wellmere, Brackendale, Oldstone, Larkhill, Pennick, Fairhaven, "
        "Grimsford, Hollowell, Ivydale, Kingsmere, Marshgate, Northwick, Redbourne, Silverton, "
        "Thornby, Westerley"
    ),
    intros=(
        "{s} is a small town with a long history.",
        "Travellers like to stop in {s}.",
        "The town of {s} has a quiet market square.",
    ),
    slots={
        "river": Slot(
            (
                "{s} lies on the river {v}.",
                "The river {v} flows through {s}.",
                "Through {s} runs the river {v}.",
            ),
            (
                "Which river flows through {s}?",
                "On which river does {s} lie?",
                "What is the name of the river in {s}?",
            ),
            _words(
                "Elder, Tamble, Corra, Windle, Ossen, Harrow, Lisk, Mere, Calder, Brume, Sallow, Yarrow, "
                "Dunne, Fleet, Garrow"
            ),
        ),
        "mayor": Slot(
            ("The mayor of {s} is {v}.", "{v} is the mayor of {s}.", "{s} has a mayor named {v}."),
            (
                "Who is the mayor of {s}?",
                "What is the name of the mayor of {s}?",
                "Who serves as mayor of {s}?",
            ),
            PEOPLE,
        ),
        "founded": Slot(
            (
                "{s} was founded in {v}.",
                "The year {v} saw the founding of {s}.",
                "Settlers founded {s} in {v}.",
            ),
            (
                "When was {s} founded?",
                "In which year was {s} founded?",
                "What year was {s} founded?",
            ),
            _numbers(1210, 1790, 17),
        ),
        "craft": Slot(
            ("{s} is famous for its {v}.", "{s} is best known for its {v}.", "People know {s} for its {v}."),
            (),
            _words(
                "pottery, cheese, honey, lace, cider, glass, wool, candles, baskets, bells, knives, carpets"
            ),
        ),
    },
)

COMPANY = Family(
    names=_words(
        "Northlight, Bellweather, Corvane, Halden Works, Arbex, Silverline, Tessaro, Quanta "
        "Mills, Redfern, Oakhurst, Lumen Trade, Vastro, Delphi Tools, Kestrel Foods, Marlin "
        "Group, Pentagon Paper, Solace, Zenith Rail"
    ),
    intros=(
        "{s} is a company with a good name.",
        "The newspaper wrote about the company {s}.",
        "Students often visit the company {s}.",
    ),
    slots={
        "founder": Slot(
            ("{s} was founded by {v}.", "The founder of {s} is {v}.", "{v} founded {s}."),
            ("Who founded {s}?", "Who is the founder of {s}?", "What is the name of the founder of {s}?"),
            PEOPLE,
        ),
        "city": Slot(
            (
                "The main office of {s} is in {v}.",
                "{s} has its head office in {v}.",
                "{s} is based in {v}.",
            ),
            (
                "In which city is the main office of {s}?",
                "Where is the head office of {s}?",
                "Where is {s} based?",
            ),
            CITIES,
        ),
        "year": Slot(
            ("{s} was started in {v}.", "{s} opened for business in {v}.", "The first year of {s} was {v}."),
            (
                "In which year was {s} started?",
                "When did {s} open for business?",
                "What was the first year of {s}?",
            ),
            YEARS,
        ),
        "staff": Slot(
            (
                "{s} has {v} employees.",
                "At present {s} has {v} employees.",
                "The company {s} has {v} employees.",
            ),
            (
                "How many employees does {s} have?",
                "What is the number of employees of {s}?",
                "How many employees are there at {s}?",
            ),
            _numbers(42, 980, 13),
        ),
    },
)

SHIP = Family(
    names=_words(
        "Aurora, Gannet, Perseus, Calypso, Tern, Halcyon, Mistral, Osprey, Nerissa, Vega, "
        "Corsair, Amity, Dorado, Heron, Isolde, Pelican, Sirius, Triton"
    ),
    intros=(
        "The {s} is a ship that many sailors know.",
        "A model of the ship {s} stands in the museum.",
        "The ship {s} has crossed the sea many times.",
    ),
    slots={
        "port": Slot(
            (
                "The home port of the {s} is {v}.",
                "The {s} has its home port in {v}.",
                "The {s} sails from its home port in {v}.",
            ),
            (
                "What is the home port of the {s}?",
                "Which city is the home port of the {s}?",
                "Where is the home port of the {s}?",
            ),
            CITIES,
        ),
        "length": Slot(
            (
                "The {s} is {v} metres long.",
                "The length of the {s} is {v} metres.",
                "From end to end the {s} is {v} metres long.",
            ),
            ("How long is the {s}?", "What is the length of the {s}?", "How many metres long is the {s}?"),
            _numbers(38, 260, 5),
        ),
        "launched": Slot(
            (
                "The {s} was built in {v}.",
                "The {s} was built in the year {v}.",
                "Workers built the {s} in {v}.",
            ),
            (),
            YEARS,
        ),
        "cargo": Slot(
            (
                "The {s} carries {v}.",
                "As cargo the {s} carries {v}.",
                "Most of the time the {s} carries {v}.",
            ),
            ("What does the {s} carry?", "What cargo does the {s} carry?", "Which cargo does the {s} carry?"),
            _words(
                "coal, timber, grain, sugar, coffee, cotton, iron, salt, bananas, cement, wool, rice, "
                "tea, bricks"
            ),
        ),
    },
)

FAMILIES: dict[str, Family] = {
    "person": PERSON,
    "zoo": ZOO,
    "book": BOOK,
    "product": PRODUCT,
    "event": EVENT,
    "town": TOWN,
    "company": COMPANY,
    "ship": SHIP,
}
