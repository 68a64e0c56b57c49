"""The words that `generator.py` fills its sentences with, written for this project."""

NAMES = (
    "Amara", "Ben", "Chloe", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas",
    "Keiko", "Liam", "Maya", "Noah", "Olga", "Pedro", "Quinn", "Rosa", "Samir", "Tara",
    "Uma", "Viktor", "Wanda", "Xenia", "Yusuf", "Zoe", "Anton", "Bella", "Carlos", "Dana",
    "Emil", "Fatima", "George", "Hana", "Ivan", "Julia", "Kofi", "Laura", "Marco", "Nadia",
)  # fmt: skip
THINGS = (
    "apples", "marbles", "stamps", "pencils", "books", "stickers", "cookies", "tickets",
    "shells", "candles", "oranges", "buttons", "postcards", "coins", "balloons", "cards",
    "tomatoes", "bricks", "flowers", "beads", "cups", "eggs", "magazines", "puzzles",
    "notebooks", "lemons", "ribbons", "plates", "feathers", "badges",
)  # fmt: skip
UNITS = ("grams", "cups", "spoons", "ounces", "handfuls")
INGREDIENTS = (
    "flour", "sugar", "rice", "butter", "cheese", "oats", "spinach", "beans", "cocoa", "honey",
)  # fmt: skip

# Elements of a list, tests that they can pass, and what can be returned of those that pass.
_NUMBER_RESULTS = (
    "the sum of those", "the largest of those", "the smallest of those", "the count of those",
    "a sorted list of those", "the average of those", "the first three of those",
    "the indices of those", "the product of those", "a list of the squares of those",
)  # fmt: skip
_WORD_RESULTS = (
    "a list of those", "the count of those", "the longest of those", "a sorted list of those",
    "the first of those", "a dictionary with the lengths of those", "the last of those",
    "one string that joins those", "the set of those", "an upper-case copy of those",
)  # fmt: skip
CODE_LISTS = (
    (
        "integers",
        (
            "are even", "are odd", "are prime", "are negative", "are perfect squares",
            "appear more than once", "are larger than the average", "end in the digit 7",
            "are divisible by 3", "are divisible by 5 but not by 2", "have two digits",
            "are larger than their left neighbour", "are palindromes", "are powers of two",
        ),
        _NUMBER_RESULTS,
    ),
    (
        "floats",
        (
            "are positive", "are smaller than 1", "lie between 0 and 10", "are whole numbers",
            "are above the median", "differ from the first one", "are larger than 100",
            "are closer to 1 than to 0",
        ),
        _NUMBER_RESULTS,
    ),
    (
        "words",
        (
            "start with a vowel", "end with 's'", "are palindromes", "have more than five letters",
            "contain a digit", "contain the letter 'e'", "are capitalised", "appear only once",
            "have no repeated letters", "have an even length", "start and end with one letter",
            "are in upper case", "contain a hyphen",
        ),
        _WORD_RESULTS,
    ),
)  # fmt: skip
CODE_NAMES = (
    "clean", "transform", "convert", "process", "solve", "analyse", "rewrite", "summarise",
    "check", "encode", "fix", "inspect",
)  # fmt: skip
CODE_STRINGS = (
    "the text reversed", "the number of vowels", "the most frequent letter",
    "the text without punctuation", "the words in reverse order", "the text in title case",
    "the longest word", "the number of words", "the text with every second letter in upper case",
    "True if the text is a palindrome", "a dictionary that counts each word",
    "the text without repeated spaces", "the initials of all words", "the digits in the text",
    "the text with vowels replaced by '*'", "the first word that occurs twice",
    "the text shifted by three letters, as in a Caesar cipher", "the average word length",
    "True if all brackets are balanced", "the text split into lines of 20 letters",
    "the text in snake case", "the text in camel case", "the number of sentences",
    "the list of email addresses in it", "the shortest word", "the text without its vowels",
)  # fmt: skip
CODE_NUMBERS = (
    "returns the n-th Fibonacci number", "returns the factorial of n", "tells if n is prime",
    "returns the sum of the digits of n", "returns the binary form of n as a string",
    "returns all divisors of n", "returns the prime factors of n", "counts down from n to zero",
    "returns the n-th triangular number", "converts n degrees Celsius to Fahrenheit",
    "converts n minutes to hours and minutes", "returns n written as a Roman numeral",
    "returns the length of the Collatz sequence of n", "prints a multiplication table for n",
    "returns the greatest common divisor of n and 36", "returns n in words",
    "returns the first n even numbers", "prints a triangle of n lines of stars",
    "tells if n is a perfect number", "returns the square root of n by Newton's method",
    "returns the number of trailing zeros of n factorial", "returns the n-th power of two",
    "returns the list of leap years after the year n", "rounds n to the nearest ten",
)  # fmt: skip
RECORDS = (
    "student", "product", "book", "order", "song", "city", "employee", "movie", "player", "recipe",
    "car", "flight", "invoice", "pet", "ticket", "task",
)  # fmt: skip
FIELDS = (
    "name", "price", "year", "score", "weight", "rating", "length", "age", "stock", "colour",
)  # fmt: skip
CODE_RECORDS = (
    "sorts a list of them by '{field}'",
    "returns the one with the largest '{field}'",
    "groups a list of them by '{other}'",
    "removes those whose '{field}' is missing",
    "returns the sum of '{field}' over those with the same '{other}'",
    "returns a dictionary from '{other}' to '{field}'",
    "writes a list of them to a CSV file",
    "prints a list of them as a table with a header",
    "counts how many share the same '{other}'",
    "returns the three with the smallest '{field}'",
)
CODE_METHODS = (
    "returns a readable description", "compares it with another one", "returns a copy of it",
    "checks that both are valid", "turns it into a dictionary", "writes it as JSON",
    "changes both at once", "prints it on one line",
)  # fmt: skip
CODE_CLOSINGS = (
    "", "", " Include a docstring.", " Add an example call.", " Keep it as short as you can.",
    " Explain how it works.", " Use type hints.", " Handle empty input.", " Add two tests.",
)  # fmt: skip

TOPIC_GROUPS = (
    (
        "photosynthesis", "gravity", "evaporation", "electricity", "magnetism", "friction",
        "evolution", "the water cycle", "a solar eclipse", "the greenhouse effect", "erosion",
        "plate tectonics", "the immune system", "digestion", "respiration", "a rainbow",
        "the tides", "an earthquake", "a volcano", "a black hole", "the food chain",
        "radioactivity",
    ),
    (
        "a variable", "a loop", "recursion", "a compiler", "an operating system", "a database",
        "encryption", "machine learning", "a neural network", "an algorithm", "a web browser",
        "cloud computing", "a hash table", "version control", "a computer virus", "an API",
        "unit testing", "a linked list", "a firewall", "open-source software",
    ),
    (
        "inflation", "a budget", "compound interest", "supply and demand", "insurance", "a loan",
        "a tax", "a stock", "a bond", "a pension", "a credit card", "a mortgage", "a salary",
        "a trade deficit", "unemployment", "a monopoly", "an auction", "a small business",
    ),
    (
        "a fraction", "a percentage", "a prime number", "a triangle", "probability", "an average",
        "the median", "a right angle", "the number pi", "an equation", "a square root", "a graph",
        "a function", "an exponent", "a logarithm", "symmetry", "a negative number", "a ratio",
    ),
    (
        "yoga", "running", "swimming", "meditation", "sleep", "a balanced diet", "vitamins",
        "hiking", "cycling", "stretching", "weight training", "dancing", "walking", "first aid",
        "gardening", "cooking at home", "baking bread", "playing chess", "painting", "photography",
    ),
    (
        "democracy", "a constitution", "the Renaissance", "the Roman Empire", "ancient Egypt",
        "the Industrial Revolution", "the printing press", "the Silk Road", "the Middle Ages",
        "the Space Race", "the invention of writing", "a treaty", "an election", "a museum",
        "the Bronze Age", "the Olympic Games", "the steam engine", "the telegraph",
    ),
    (
        "a metaphor", "a simile", "a poem", "a novel", "a short story", "a haiku", "irony",
        "a noun", "an adjective", "a verb", "punctuation", "a paragraph", "a cover letter",
        "an essay", "a fable", "an idiom", "a dictionary", "a business email", "a speech",
    ),
    (
        "a whale", "a penguin", "an octopus", "a butterfly", "a honey bee", "an elephant", "a bat",
        "an owl", "a spider", "a desert", "a rainforest", "a coral reef", "a glacier", "a river",
        "a mushroom", "an oak tree", "a cactus", "a wolf", "a dolphin", "a salmon",
    ),
)  # fmt: skip
READERS = (
    "a child", "a beginner", "a high-school student", "a curious friend", "a busy manager",
    "a teacher", "a tourist", "a grandparent", "a new colleague", "a college student",
)  # fmt: skip
LENGTHS = (
    "in one sentence", "in two sentences", "in three sentences", "in a short paragraph",
    "in simple words", "in under 50 words", "briefly", "as a short list",
)  # fmt: skip

TIMES = (
    "Last Monday", "Yesterday", "Two weeks ago", "This morning", "During the holidays",
    "Late at night", "On a rainy afternoon", "Before breakfast", "After the long meeting",
    "At the end of the summer", "On the first day of school", "Just before sunset",
)  # fmt: skip
ACTS = (
    "found an old letter", "repaired a broken bicycle", "baked a chocolate cake",
    "lost a set of keys", "met a famous painter", "planted a row of tulips",
    "missed the last bus", "wrote a long report", "adopted a small dog", "sold a used camera",
    "cooked soup for the neighbours", "painted the kitchen wall", "won a chess game",
    "forgot an umbrella", "learned a new song", "fixed the printer", "dropped a glass of juice",
    "read a book about the sea", "built a wooden table", "ordered the wrong size",
)  # fmt: skip
PLACES = (
    "at the office", "near the river", "in the school library", "at the market", "on the train",
    "in the garden", "behind the museum", "at the airport", "in a small village", "by the lake",
    "at the community centre", "in the old theatre",
)  # fmt: skip
SECOND_CLAUSES = (
    "and everyone was surprised", "although it was very cold", "because nobody else had time",
    "but the plan did not work", "and then called a friend", "which made the children laugh",
    "while the music was still playing", "so the day ended well", "even though the rules forbid it",
    "and it took almost three hours", "but no one noticed", "because the weather was good",
)  # fmt: skip
REWRITES = (
    "Rewrite this in a formal style: {text}",
    "Make this shorter: {text}",
    "Turn this into a list of facts: {text}",
    "Rewrite this in the future tense: {text}",
    "Rewrite this in the present tense: {text}",
    "Rewrite this as a question: {text}",
    "Rewrite this as a newspaper headline: {text}",
    "Rewrite this as a friendly text message: {text}",
    "Rewrite this in the first person: {text}",
    "Summarise this in five words: {text}",
    "Rewrite this for a young child: {text}",
    "Continue this story with two more sentences: {text}",
    "Rewrite this with a happy ending: {text}",
    "Turn this into a short dialogue: {text}",
    "Write a two-line poem about this: {text}",
    "List the verbs in this text: {text}",
    "Rewrite this in a more exciting way: {text}",
    "Write an email that apologises for this: {text}",
)
