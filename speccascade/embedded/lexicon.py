"""The words of the generated language: what each English word means in German, with the synonyms' weights.

A line is `English : German | German …`; a number at the end of an alternative is its weight, 1 where there is none.
"""

from collections.abc import Iterator
import dataclasses
import functools

# kind: singular plural : noun gender plural [oblique singular of the n-declension]
_NOUNS = """
person: man men : Mann m Männer 4 | Kerl m Kerle 1
person: woman women : Frau f Frauen 5 | Dame f Damen 1
person: boy boys : Junge m Jungen Jungen 5 | Bub m Buben Buben 1
person: girl girls : Mädchen n Mädchen
person: child children : Kind n Kinder
person: baby babies : Baby n Babys 3 | Säugling m Säuglinge 1
person: teacher teachers : Lehrer m Lehrer 2 | Lehrerin f Lehrerinnen 1
person: student students : Student m Studenten Studenten 2 | Studentin f Studentinnen 1
person: doctor doctors : Arzt m Ärzte 2 | Ärztin f Ärztinnen 1
person: farmer farmers : Bauer m Bauern Bauern 2 | Landwirt m Landwirte 1
person: cook cooks : Koch m Köche 3 | Köchin f Köchinnen 1
person: dancer dancers : Tänzer m Tänzer 1 | Tänzerin f Tänzerinnen 2
person: worker workers : Arbeiter m Arbeiter
person: tourist tourists : Tourist m Touristen Touristen
person: neighbour neighbours : Nachbar m Nachbarn Nachbarn 2 | Nachbarin f Nachbarinnen 1
person: friend friends : Freund m Freunde 2 | Freundin f Freundinnen 1
person: soldier soldiers : Soldat m Soldaten Soldaten
person: policeman policemen : Polizist m Polizisten Polizisten
person: grandmother grandmothers : Großmutter f Großmütter 1 | Oma f Omas 1
person: grandfather grandfathers : Großvater m Großväter 1 | Opa m Opas 1
person: mother mothers : Mutter f Mütter
person: father fathers : Vater m Väter
person: brother brothers : Bruder m Brüder
person: sister sisters : Schwester f Schwestern
person: musician musicians : Musiker m Musiker
person: singer singers : Sänger m Sänger 1 | Sängerin f Sängerinnen 1
person: painter painters : Maler m Maler
person: player players : Spieler m Spieler
person: customer customers : Kunde m Kunden Kunden 2 | Kundin f Kundinnen 1
person: guest guests : Gast m Gäste
animal: dog dogs : Hund m Hunde
animal: cat cats : Katze f Katzen 4 | Kater m Kater 1
animal: horse horses : Pferd n Pferde
animal: cow cows : Kuh f Kühe
animal: bird birds : Vogel m Vögel
animal: goat goats : Ziege f Ziegen
animal: monkey monkeys : Affe m Affen Affen
animal: elephant elephants : Elefant m Elefanten Elefanten
animal: lion lions : Löwe m Löwen Löwen
animal: bear bears : Bär m Bären Bären
animal: rabbit rabbits : Hase m Hasen Hasen 1 | Kaninchen n Kaninchen 2
animal: duck ducks : Ente f Enten
animal: mouse mice : Maus f Mäuse
animal: pig pigs : Schwein n Schweine
animal: donkey donkeys : Esel m Esel
animal: frog frogs : Frosch m Frösche
thing: ball balls : Ball m Bälle
thing: book books : Buch n Bücher
thing: newspaper newspapers : Zeitung f Zeitungen
thing: letter letters : Brief m Briefe
thing: picture pictures : Bild n Bilder 2 | Foto n Fotos 1
thing: guitar guitars : Gitarre f Gitarren
thing: drum drums : Trommel f Trommeln
thing: umbrella umbrellas : Regenschirm m Regenschirme 2 | Schirm m Schirme 1
thing: suitcase suitcases : Koffer m Koffer
thing: box boxes : Kiste f Kisten 1 | Schachtel f Schachteln 1 | Karton m Kartons 1
thing: basket baskets : Korb m Körbe
thing: bucket buckets : Eimer m Eimer
thing: bottle bottles : Flasche f Flaschen
thing: cup cups : Tasse f Tassen
thing: plate plates : Teller m Teller
thing: knife knives : Messer n Messer
thing: rope ropes : Seil n Seile
thing: flag flags : Fahne f Fahnen 1 | Flagge f Flaggen 1
thing: lamp lamps : Lampe f Lampen
thing: toy toys : Spielzeug n Spielzeuge
thing: stick sticks : Stock m Stöcke
thing: stone stones : Stein m Steine
thing: key keys : Schlüssel m Schlüssel
thing: phone phones : Telefon n Telefone 1 | Handy n Handys 2
thing: camera cameras : Kamera f Kameras
thing: flower flowers : Blume f Blumen
thing: balloon balloons : Ballon m Ballons
thing: kite kites : Drachen m Drachen
thing: chair chairs : Stuhl m Stühle
thing: ladder ladders : Leiter f Leitern
food: apple apples : Apfel m Äpfel
food: pear pears : Birne f Birnen
food: cake cakes : Kuchen m Kuchen 2 | Torte f Torten 1
food: sandwich sandwiches : Brot n Brote
food: egg eggs : Ei n Eier
food: potato potatoes : Kartoffel f Kartoffeln
food: carrot carrots : Karotte f Karotten 1 | Möhre f Möhren 1
food: banana bananas : Banane f Bananen
food: tomato tomatoes : Tomate f Tomaten
food: sausage sausages : Wurst f Würste
vehicle: car cars : Auto n Autos 3 | Wagen m Wagen 1
vehicle: bicycle bicycles : Fahrrad n Fahrräder 3 | Rad n Räder 1
vehicle: boat boats : Boot n Boote 3 | Kahn m Kähne 1
vehicle: truck trucks : Lastwagen m Lastwagen
vehicle: motorcycle motorcycles : Motorrad n Motorräder
vehicle: tractor tractors : Traktor m Traktoren
vehicle: wheelbarrow wheelbarrows : Schubkarre f Schubkarren
clothes: hat hats : Hut m Hüte
clothes: cap caps : Mütze f Mützen 2 | Kappe f Kappen 1
clothes: shirt shirts : Hemd n Hemden
clothes: dress dresses : Kleid n Kleider
clothes: coat coats : Mantel m Mäntel
clothes: jacket jackets : Jacke f Jacken
clothes: skirt skirts : Rock m Röcke
clothes: scarf scarves : Schal m Schals
clothes: helmet helmets : Helm m Helme
clothes: sweater sweaters : Pullover m Pullover 2 | Pulli m Pullis 1
clothes: shoe shoes : Schuh m Schuhe
clothes: glove gloves : Handschuh m Handschuhe
clothes: ring rings : Ring m Ringe
clothes: backpack backpacks : Rucksack m Rucksäcke
clothes: bag bags : Tasche f Taschen
inside: house houses : Haus n Häuser
inside: garden gardens : Garten m Gärten
inside: park parks : Park m Parks
inside: kitchen kitchens : Küche f Küchen
inside: room rooms : Zimmer n Zimmer 2 | Raum m Räume 1
inside: forest forests : Wald m Wälder
inside: river rivers : Fluss m Flüsse
inside: lake lakes : See m Seen
inside: school schools : Schule f Schulen
inside: church churches : Kirche f Kirchen
inside: shop shops : Laden m Läden 1 | Geschäft n Geschäfte 2
inside: station stations : Bahnhof m Bahnhöfe
inside: hospital hospitals : Krankenhaus n Krankenhäuser 3 | Spital n Spitäler 1
inside: museum museums : Museum n Museen
inside: tent tents : Zelt n Zelte
inside: barn barns : Scheune f Scheunen
inside: cave caves : Höhle f Höhlen
inside: pool pools : Schwimmbecken n Schwimmbecken 1 | Becken n Becken 1
inside: office offices : Büro n Büros
inside: village villages : Dorf n Dörfer
inside: city cities : Stadt f Städte
inside: castle castles : Schloss n Schlösser 2 | Burg f Burgen 1
surface: street streets : Straße f Straßen
surface: table tables : Tisch m Tische
surface: bench benches : Bank f Bänke
surface: sofa sofas : Sofa n Sofas 2 | Couch f Couchs 1
surface: bed beds : Bett n Betten
surface: roof roofs : Dach n Dächer
surface: bridge bridges : Brücke f Brücken
surface: field fields : Feld n Felder
surface: meadow meadows : Wiese f Wiesen
surface: hill hills : Hügel m Hügel
surface: mountain mountains : Berg m Berge
surface: stage stages : Bühne f Bühnen
surface: carpet carpets : Teppich m Teppiche
surface: wall walls : Mauer f Mauern
surface: tower towers : Turm m Türme
surface: rock rocks : Felsen m Felsen
surface: staircase staircases : Treppe f Treppen
landmark: tree trees : Baum m Bäume
landmark: door doors : Tür f Türen
landmark: window windows : Fenster n Fenster
landmark: fence fences : Zaun m Zäune
landmark: fountain fountains : Brunnen m Brunnen
landmark: statue statues : Statue f Statuen
landmark: fire fires : Feuer n Feuer
landmark: gate gates : Tor n Tore
"""

# what it fits: English : German stem (before an ending; `!` takes none)
_ADJECTIVES = """
any: small : klein
any: big : groß 3 | riesig 1
any: old : alt
any: young : jung
any: beautiful : schön 3 | hübsch 1
any: strange : seltsam 1 | merkwürdig 1
any: dirty : schmutzig 3 | dreckig 1
any: wet : nass
living: tired : müd
living: happy : fröhlich 1 | glücklich 1
living: hungry : hungrig
living: fat : dick
living: thin : dünn 2 | mager 1
living: brave : tapfer 1 | mutig 2
living: sad : traurig
living: quiet : ruhig 1 | still 1
living: blond : blond
object: red : rot
object: blue : blau
object: green : grün
object: yellow : gelb
object: white : weiß
object: black : schwarz
object: brown : braun
object: grey : grau
object: pink : rosa!
object: purple : lila! 2 | violett 1
object: new : neu
object: broken : kaputt 2 | zerbrochen 1
object: heavy : schwer
object: expensive : teur 3 | kostbar 1
object: empty : leer
object: dark : dunkl
object: colourful : bunt
object: wooden : hölzern
site: high : hoh
site: wide : breit
site: abandoned : verlassen
site: famous : berühmt
"""

# frame, objects: participle base : third person, infinitive (a prefix that separates stands before `+`)
_VERBS = """
at: sleeping sleep : schläft schlafen
at: sitting sit : sitzt sitzen
at: standing stand : steht stehen
at: lying lie : liegt liegen
at: playing play : spielt spielen
at: working work : arbeitet arbeiten
at: waiting wait : wartet warten
at: dancing dance : tanzt tanzen
at: singing sing : singt singen
at: swimming swim : schwimmt schwimmen
at: resting rest : ruht aus+ruhen 1 | rastet rasten 1
at: shopping shop : kauft ein+kaufen
at: training train : trainiert trainieren 2 | übt üben 1
at: falling-asleep fall-asleep : schläft ein+schlafen
at: laughing laugh : lacht lachen
at: crying cry : weint weinen
to: running run : läuft laufen 1 | rennt rennen 2
to: walking walk : geht gehen
to: jumping jump : springt springen 3 | hüpft hüpfen 1
to: climbing climb : klettert klettern 2 | steigt steigen 1
to: crawling crawl : kriecht kriechen
to: driving drive : fährt fahren
to: flying fly : fliegt fliegen
to: falling fall : fällt fallen 3 | stürzt stürzen 1
to: looking look : schaut schauen 2 | blickt blicken 1
what thing food clothes: holding hold : hält halten
what thing food clothes: carrying carry : trägt tragen
what thing food clothes: buying buy : kauft kaufen
what thing food clothes vehicle: selling sell : verkauft verkaufen
what thing food clothes: dropping drop : lässt fallen+lassen
what thing food clothes: picking-up pick-up : hebt auf+heben
what thing food clothes vehicle animal person: watching watch : beobachtet beobachten 2 | sieht an+sehen 1
what thing clothes animal person: looking-at look-at : schaut an+schauen 2 | betrachtet betrachten 1
what thing vehicle inside surface: cleaning clean : putzt putzen 1 | reinigt reinigen 1
what thing vehicle clothes: washing wash : wäscht waschen
what thing vehicle: repairing repair : repariert reparieren
what thing person animal inside landmark: painting paint : malt malen 2 | zeichnet zeichnen 1
what person animal: hugging hug : umarmt umarmen
what person animal: calling call : ruft rufen
what person animal: feeding feed : füttert füttern
what person animal: chasing chase : jagt jagen 2 | verfolgt verfolgen 1
what person animal: carrying-away carry-away : trägt weg+tragen
what person animal: photographing photograph : fotografiert fotografieren
what food: eating eat : isst essen
what food: cutting cut : schneidet schneiden
what food: cooking cook : kocht kochen 2 | bereitet zu+bereiten 1
what clothes: wearing wear : trägt tragen
what clothes: putting-on put-on : zieht an+ziehen
what clothes: taking-off take-off : zieht aus+ziehen
what thing vehicle inside landmark: showing show : zeigt zeigen 2 | führt vor+führen 1
what vehicle thing food: pulling pull : zieht ziehen
what vehicle thing: pushing push : schiebt schieben
what inside landmark surface: leaving leave : verlässt verlassen
what inside landmark surface vehicle: visiting visit : besucht besuchen 2 | besichtigt besichtigen 1
what landmark inside: opening open : öffnet öffnen 1 | macht auf+machen 1
what landmark inside: closing close : schließt schließen 1 | macht zu+machen 1
whom person animal: helping help : hilft helfen
whom person animal: following follow : folgt folgen 3 | läuft nach+laufen 1
whom person animal: listening-to listen-to : hört zu+hören 2 | lauscht lauschen 1
whom person: thanking thank : dankt danken
whom person animal: waving-to wave-to : winkt winken 1 | winkt zu+winken 1
whom person: answering answer : antwortet antworten
put thing food clothes: putting put : legt legen 2 | stellt stellen 1
put thing food clothes: throwing throw : wirft werfen
put thing food clothes: dragging drag : schleppt schleppen 2 | schleift schleifen 1
put thing food clothes: bringing bring : bringt bringen
put person animal: pushing-down push-down : stößt stoßen
put person animal: leading lead : führt führen
put animal thing: hiding hide : versteckt verstecken
"""

_ADVERBS = """
how: slowly : langsam
how: quickly : schnell 3 | rasch 1
how: happily : fröhlich 2 | vergnügt 1
how: quietly : leise
how: carefully : vorsichtig 2 | behutsam 1
how: alone : allein 3 | alleine 1
how: together : zusammen 1 | gemeinsam 1
how: again : wieder 3 | erneut 1
when: today : heute
when: now : jetzt 3 | nun 1
when: often : oft 2 | häufig 1
when: in-the-morning : am Morgen 2 | morgens 1
when: in-the-evening : am Abend 2 | abends 1
when: at-night : in der Nacht 1 | nachts 2
when: in-winter : im Winter
when: in-summer : im Sommer
when: on-Sunday : am Sonntag 3 | sonntags 1
when: every-day : jeden Tag 2 | täglich 1
when: after-lunch : nach dem Essen 1 | nach dem Mittagessen 1
"""

# case, kinds of place: English : German. `both` takes the dative for a place and the accusative for a direction.
_PREPOSITIONS = """
both inside: in : in
both surface: on : auf
both landmark surface vehicle inside: behind : hinter
both landmark surface vehicle inside: in-front-of : vor
both landmark surface vehicle inside: next-to : neben
both landmark surface vehicle: under : unter
to-acc inside landmark: through : durch
to-acc landmark inside: around : um
to-acc surface landmark vehicle: over : über
to-dat inside: out-of : aus
to-dat inside landmark surface person: towards : zu
at-dat landmark inside surface: near : bei
at-dat inside surface: far-from : weit von
"""


@dataclasses.dataclass(frozen=True)
class Noun:
  """A German noun; `oblique` is its dative and accusative singular."""

  name: str
  gender: str
  plural: str
  oblique: str


@dataclasses.dataclass(frozen=True)
class Verb:
  """A German verb: the third person, the infinitive and the prefix that separates from it."""

  third: str
  infinitive: str
  prefix: str


@dataclasses.dataclass(frozen=True)
class Entry:
  """An English word with its forms, what it goes with, and its German alternatives with their weights."""

  category: str
  kinds: tuple[str, ...]  # noun: its own; verb: of its objects; preposition: of its places
  forms: tuple[str, ...]
  german: tuple[tuple[float, object], ...] = dataclasses.field(hash=False, compare=False)

  @property
  def key(self) -> str:
    return self.forms[0]


def _entries(table: str, make) -> Iterator[Entry]:
  """Yield the entries of a table."""
  for line in table.strip().splitlines():
    kinds, english, german = (part.strip() for part in line.split(':'))
    category, *rest = kinds.split()
    options = []
    for option in german.split('|'):
      *fields, weight = [*option.split(), '1'] if not option.split()[-1].isdigit() else option.split()
      options.append((float(weight), make(*fields)))
    forms = tuple(form.replace('-', ' ') for form in english.split())
    yield Entry(category, tuple(rest) or (category,), forms, tuple(options))


def _noun(name: str, gender: str, plural: str, oblique: str = '') -> Noun:
  return Noun(name, gender, plural, oblique or name)


def _verb(third: str, infinitive: str) -> Verb:
  prefix, plus, stem = infinitive.partition('+')
  return Verb(third, stem if plus else infinitive, prefix if plus else '')


def _words(*words: str) -> str:
  return ' '.join(words)


@functools.cache
def nouns() -> tuple[Entry, ...]:
  """Return the nouns."""
  return tuple(_entries(_NOUNS, _noun))


@functools.cache
def adjectives() -> tuple[Entry, ...]:
  """Return the adjectives; a German stem ends in `!` where it takes no ending."""
  return tuple(_entries(_ADJECTIVES, _words))


@functools.cache
def verbs() -> tuple[Entry, ...]:
  """Return the verbs; the category is the frame."""
  return tuple(_entries(_VERBS, _verb))


@functools.cache
def adverbs() -> tuple[Entry, ...]:
  """Return the adverbs of manner and of time."""
  return tuple(_entries(_ADVERBS, _words))


@functools.cache
def prepositions() -> tuple[Entry, ...]:
  """Return the prepositions of place and direction."""
  return tuple(_entries(_PREPOSITIONS, _words))
