"""Plain talks: greetings, small facts, names to remember, and what nobody can know."""

from __future__ import annotations

import random

from demo.chat.talks import Answer, Message, Talk, user

GREETINGS = (
    "Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Hey", "Good morning", "Good morning!",
    "Hi there!", "Good evening.", "Hello there", "hey there", "Good afternoon!",
    "Hello, how are you?", "Hi, how are you?", "How are you?", "How do you do?",
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Norway": "Oslo", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo",
    "Germany": "Berlin", "Greece": "Athens", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Austria": "Vienna",
    "Ireland": "Dublin", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana",
    "Canada": "Ottawa", "China": "Beijing", "Hungary": "Budapest", "England": "London",
    "Russia": "Moscow", "Chile": "Santiago", "Iceland": "Reykjavik", "Belgium": "Brussels",
}  # fmt: skip
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "new"), ("high", "low"),
    ("open", "closed"), ("first", "last"), ("left", "right"), ("day", "night"), ("full", "empty"),
    ("long", "short"), ("early", "late"), ("black", "white"), ("true", "false"), ("up", "down"),
    ("start", "end"), ("read", "write"), ("hard", "easy"), ("loud", "quiet"), ("wet", "dry"),
)  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red",
    "a lemon": "yellow", "a ripe banana": "yellow", "milk": "white", "the sea": "blue",
    "an orange": "orange", "a raven": "black", "a tomato": "red",
}  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
LEGS = {
    "a dog": "four", "a cat": "four", "a spider": "eight", "an ant": "six", "a bird": "two",
    "a horse": "four", "a bee": "six", "a fish": "no", "a snake": "no", "a cow": "four",
}  # fmt: skip
PYTHON = {
    "len": "the number of items of a container", "sorted": "a sorted list of the items",
    "max": "the largest item", "min": "the smallest item", "sum": "the sum of the items",
    "abs": "the absolute value of a number", "range": "numbers one after the other",
    "open": "a file object for a path", "str": "a string made from an object",
    "int": "an integer made from a number or a string", "reversed": "the items in reverse order",
    "zip": "tuples of the items of several iterables", "type": "the type of an object",
}  # fmt: skip
NAMES = (
    "Anna", "Tom", "Lisa", "Max", "Peter", "Maria", "Paul", "Emma", "Jack", "Sara", "Ben", "Nina",
    "Oscar", "Julia", "Leo", "Ida", "Mark", "Eva", "Sam", "Alice", "Bob", "David", "Karl", "Olga",
)  # fmt: skip
LIKED = (
    "tea", "coffee", "music", "chess", "football", "books", "cats", "dogs", "trains", "the sea",
    "mountains", "bread", "apples", "rain", "poems", "films",
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "Answer briefly.", "You are a small demo model.",
    "Be polite and short.", "You help with small questions.",
)  # fmt: skip
UNKNOWN = (
    "Who won the {x} yesterday?", "What will the {x} cost next year?", "Where is my {x}?",
    "Who wrote the {x} on my desk?", "What is the number of my {x}?", "When does my {x} arrive?",
    "Who sold you the {x}?", "What did I say about the {x} last week?", "Is my {x} broken?",
)  # fmt: skip
THINGS = (
    "match", "race", "train", "house", "car", "letter", "ticket", "phone", "bicycle", "parcel",
    "election", "lottery", "prize", "report", "key", "bag", "lamp", "boat", "table", "game",
)  # fmt: skip
I_AM = "I am the small demo model of dflash-moe."


def system_of(rng: random.Random) -> list[Message]:
    """Perhaps a message of the system."""
    if rng.random() < 0.25:
        return [{"role": "system", "content": rng.choice(SYSTEMS)}]
    return []


def fact(rng: random.Random) -> tuple[str, Answer]:
    """A question that has one right answer."""
    country, capital = rng.choice([*CAPITALS.items()])
    one, other = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        one, other = other, one
    thing, colour = rng.choice([*COLOURS.items()])
    animal, legs = rng.choice([*LEGS.items()])
    function, gives = rng.choice([*PYTHON.items()])
    cycle = DAYS if rng.random() < 0.5 else MONTHS
    place = rng.randrange(len(cycle))
    here, after, before = cycle[place], cycle[(place + 1) % len(cycle)], cycle[place - 1]
    unit = "day" if cycle is DAYS else "month"
    word = rng.choice([*LIKED, *THINGS, *NAMES]).split()[-1]
    questions = (
        (
            rng.choice(("What is the capital of {}?", "Which city is the capital of {}?",
                        "capital of {}?", "Tell me the capital of {}.",
                        "Do you know the capital of {}?")).format(country),
            Answer(f"The capital of {country} is {capital}.", capital),
        ),
        (
            rng.choice(("What is the opposite of {}?", "opposite of {}?",
                        "Tell me the opposite of {}.", "Which word is the opposite of {}?")).format(
                            one),
            Answer(f"The opposite of {one} is {other}.", other),
        ),
        (
            rng.choice(("What colour is {}?", "What color is {}?", "Which colour has {}?")).format(
                thing),
            Answer(f"{thing[0].upper()}{thing[1:]} is {colour}.", colour),
        ),
        (
            rng.choice(("How many legs has {}?", "How many legs does {} have?")).format(animal),
            Answer(f"{animal[0].upper()}{animal[1:]} has {legs} legs.", legs),
        ),
        (
            rng.choice(("What does {} do in Python?", "What does {}() return?",
                        "What is {} in Python?", "Explain {}() in Python.")).format(function),
            Answer(f"`{function}` gives {gives}.", gives),
        ),
        (
            rng.choice(("Which {u} comes after {x}?", "What {u} is after {x}?",
                        "Which {u} follows {x}?")).format(u=unit, x=here),
            Answer(f"After {here} comes {after}.", after),
        ),
        (
            rng.choice(("Which {u} comes before {x}?", "What {u} is before {x}?")).format(
                u=unit, x=here),
            Answer(f"Before {here} comes {before}.", before),
        ),
        (
            rng.choice(("Say {}.", "Please say {}.", "Repeat the word {}.")).format(word),
            Answer(f"{word[0].upper()}{word[1:]}.", word[1:]),
        ),
    )  # fmt: skip
    return rng.choice(questions)


def greeting(rng: random.Random) -> tuple[str, Answer]:
    """A greeting, or a question about the model."""
    if rng.random() < 0.6:
        text = rng.choice(GREETINGS)
        if "how" in text.lower():
            return text, Answer("I am fine, thank you. What can I do for you?", "fine")
        return text, Answer("Hello! What can I do for you?", "Hello")
    return rng.choice(
        (
            ("Who are you?", Answer(I_AM, "demo")),
            ("What are you?", Answer(I_AM, "demo")),
            ("What is your name?", Answer(I_AM, "demo")),
            ("Are you a person?", Answer(f"No. {I_AM}", "No")),
            ("What can you do?", Answer("I can greet, add numbers, and call tools.", "tools")),
            ("Help", Answer("I can greet, add numbers, and call tools.", "tools")),
            ("Thank you!", Answer("You are welcome.", "welcome")),
            ("Thanks", Answer("You are welcome.", "welcome")),
            ("Bye", Answer("Goodbye!", "bye")),
            ("Goodbye", Answer("Goodbye!", "bye")),
        )
    )


def unknown(rng: random.Random) -> tuple[str, Answer]:
    """What the model cannot know, or has no tool for."""
    if rng.random() < 0.3:
        city = rng.choice([*CAPITALS.values()])
        return rng.choice(
            (
                (f"What time is it in {city}?", Answer("I do not know: I have no clock.", "clock")),
                (f"How is the weather in {city}?", Answer("I do not know.", "not know")),
                ("What time is it?", Answer("I do not know: I have no clock.", "clock")),
            )
        )
    text = rng.choice(UNKNOWN).format(x=rng.choice(THINGS))
    return text, Answer("I do not know.", "not know")


def remembered(rng: random.Random) -> list[Message | Answer]:
    """Turns in which the user says something, and asks for it later."""
    name, liked = rng.choice(NAMES), rng.choice(LIKED)
    between: list[Message | Answer] = []
    if rng.random() < 0.5:
        text, answer = fact(rng)
        between = [user(text), answer]
    if rng.random() < 0.6:
        said = rng.choice(("My name is {}.", "I am {}.", "Hi, my name is {}!", "Call me {}."))
        asks = rng.choice(("What is my name?", "Who am I?", "Do you know my name?"))
        return [
            user(said.format(name)),
            Answer(f"Nice to meet you, {name}!", name),
            *between,
            user(asks),
            Answer(f"Your name is {name}.", name),
        ]
    asks = rng.choice(("What do I like?", "Do you know what I like?"))
    return [
        user(f"I like {liked}."),
        Answer(f"{liked[0].upper()}{liked[1:]}: good choice!", liked[1:]),
        *between,
        user(asks),
        Answer(f"You like {liked}.", liked),
    ]


def plain(rng: random.Random) -> Talk:
    """A talk without tools or reasoning."""
    kind = rng.choices(("greeting", "fact", "unknown", "memory"), weights=(2, 5, 2, 2))[0]
    if kind == "memory":
        return Talk(kind, [*system_of(rng), *remembered(rng)])
    turns: list[Message | Answer] = [*system_of(rng)]
    if kind != "greeting" and rng.random() < 0.25:
        text, answer = greeting(rng)
        turns += [user(text), answer]
    maker = {"greeting": greeting, "fact": fact, "unknown": unknown}[kind]
    for _ in range(rng.choice((1, 1, 2))):
        text, answer = maker(rng)
        turns += [user(text), answer]
    return Talk(kind, turns)
