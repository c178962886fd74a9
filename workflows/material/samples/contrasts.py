"""Contrast pairs of the workflow `steering`: prompts with a positive and a negative continuation.

They were written for mizarr. Every three lines are a prompt, its positive and its negative continuation. The
pairs of a preset are of one kind, so that any half of them can make a direction for the other half.

Border: texts; knows no tokens and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PRESETS", "ContrastPreset", "ContrastTexts"]

ContrastTexts = tuple[str, str, str]
"""A prompt, its positive and its negative continuation; each continuation begins with a space."""


@dataclass(frozen=True)
class ContrastPreset:
    """Contrast pairs of one property of texts, and names of its two sides."""

    positive: str
    """Name of the positive continuations, in words that follow "the": "French continuation"."""
    negative: str
    """Name of the negative continuations: "English continuation"."""
    lines: str
    """The pairs, three lines each."""

    @property
    def pairs(self) -> tuple[ContrastTexts, ...]:
        """The pairs in the order of their lines."""
        rows = iter(self.lines.strip().splitlines())
        return tuple((prompt, f" {next(rows)}", f" {next(rows)}") for prompt in rows)


_FRENCH = """
She opened the door and said:
Entrez, il fait froid dehors.
Come in, it is cold outside.
The waiter asked us:
Voulez-vous du pain avec la soupe ?
Would you like some bread with the soup?
My neighbour told me:
Le chat dort dans le jardin.
The cat is sleeping in the garden.
The sign at the station reads:
Le train part à huit heures.
The train leaves at eight o'clock.
He wrote in his diary:
Aujourd'hui, nous avons visité la vieille ville.
Today we visited the old town.
The teacher explained:
La terre tourne autour du soleil.
The earth turns around the sun.
Her letter began with:
Mon cher ami, je pense souvent à toi.
My dear friend, I often think of you.
The child shouted:
Regarde, il y a un oiseau dans l'arbre !
Look, there is a bird in the tree!
On the radio they said:
Il va pleuvoir demain dans le nord.
It will rain tomorrow in the north.
The baker answered:
Le pain est encore chaud.
The bread is still warm.
The old man remembered:
La maison était petite, mais très belle.
The house was small, but very beautiful.
The note on the table says:
Je suis au marché, je reviens bientôt.
I am at the market, I will be back soon.
The doctor advised:
Il faut boire beaucoup d'eau.
You must drink a lot of water.
My sister replied:
Je ne veux pas aller à la mer.
I do not want to go to the sea.
The guide told the group:
Cette église est du douzième siècle.
This church is from the twelfth century.
The label on the bottle says:
Gardez ce vin dans un endroit frais.
Keep this wine in a cool place.
The farmer complained:
Les pommes ne sont pas encore mûres.
The apples are not ripe yet.
The first line of the song is:
La nuit est douce et la lune est claire.
The night is mild and the moon is bright.
The girl whispered:
J'ai peur du grand chien noir.
I am afraid of the big black dog.
The driver told us:
La route est fermée à cause de la neige.
The road is closed because of the snow.
The postcard said:
Nous sommes à la montagne avec les enfants.
We are in the mountains with the children.
The cook explained:
Ajoutez un peu de sel et deux oeufs.
Add a little salt and two eggs.
Her grandmother used to say:
Le temps est le meilleur médecin.
Time is the best doctor.
The shopkeeper said:
Nous n'avons plus de lait ce matin.
We have no more milk this morning.
The message on my phone was:
Je t'attends devant le cinéma.
I am waiting for you in front of the cinema.
The boy asked his father:
Pourquoi le ciel est-il bleu ?
Why is the sky blue?
The painter told me:
J'aime la lumière de cette chambre.
I love the light of this room.
The captain announced:
Le bateau arrive au port dans une heure.
The ship reaches the port in an hour.
The nurse said softly:
Votre fils va beaucoup mieux.
Your son is much better.
The poster announces:
Le concert commence à sept heures du soir.
The concert starts at seven in the evening.
The judge declared:
Cet homme est libre.
This man is free.
The students sang:
Vive les vacances, plus de devoirs.
Long live the holidays, no more homework.
The fisherman told a story:
Un jour, j'ai vu un poisson énorme.
One day I saw an enormous fish.
The last words of the book are:
Et la ville était enfin tranquille.
And the town was quiet at last.
The librarian reminded us:
Il faut rendre les livres avant lundi.
You must return the books before Monday.
His answer was short:
Non, merci, je préfère le thé.
No, thank you, I prefer tea.
The mayor promised:
Nous allons construire une nouvelle école.
We are going to build a new school.
The gardener said:
Les roses ont besoin de soleil.
Roses need sun.
The inscription on the stone reads:
Ici vivait un homme juste.
Here lived a just man.
The visitor asked:
Où est la gare, s'il vous plaît ?
Where is the station, please?
"""

_POSITIVE = """
The soup at this restaurant was
warm, rich and full of flavour.
cold, thin and without any flavour.
I think this film is
a wonderful story with brilliant actors.
a boring story with terrible actors.
The staff of the hotel were
friendly, helpful and always smiling.
rude, lazy and always complaining.
Our flight with this airline was
comfortable, quick and right on time.
uncomfortable, slow and three hours late.
The new phone is
fast, beautiful and easy to use.
slow, ugly and hard to use.
The book that I read last week was
exciting from the first page to the last.
dull from the first page to the last.
The room we rented was
clean, bright and very quiet.
dirty, dark and very noisy.
My visit to the museum was
a delight, and I learned so much.
a waste of time, and I learned nothing.
The concert last night was
amazing, and the crowd loved it.
awful, and the crowd hated it.
This coffee tastes
great, smooth and fresh.
horrible, bitter and stale.
The service in this shop is
excellent, I am very happy with it.
poor, I am very angry about it.
The game I bought is
great fun, and worth every penny.
no fun, and not worth the money.
The garden behind the house is
lovely, with beautiful flowers.
ugly, with dead flowers.
The lecture was
clear, interesting and inspiring.
confusing, tedious and pointless.
The cake she baked was
delicious, and everyone wanted more.
disgusting, and no one finished it.
Working with this team is
a pleasure, they are kind and clever.
a nightmare, they are unkind and careless.
The ending of the series was
perfect, I enjoyed it so much.
terrible, I disliked it so much.
The weather on our holiday was
fantastic, sunny every day.
dreadful, rainy every day.
This jacket is
well made, warm and comfortable.
badly made, cold and uncomfortable.
The support line was
quick, polite and solved my problem.
slow, impolite and ignored my problem.
The music in this cafe is
charming and makes people happy.
annoying and makes people leave.
The car I drove was
reliable, safe and a joy to drive.
unreliable, dangerous and a pain to drive.
The play at the theatre was
funny, moving and superbly acted.
silly, empty and poorly acted.
The view from our window was
gorgeous, we loved it.
depressing, we hated it.
The recipe turned out
wonderful, the best I have made.
awful, the worst I have made.
The beach near the town is
beautiful, with clean white sand.
filthy, covered with garbage.
My new teacher is
patient, kind and encouraging.
impatient, mean and discouraging.
The camera takes
brilliant, sharp pictures.
terrible, blurry pictures.
The story in this novel is
touching, and I highly recommend it.
worthless, and I advise against it.
The dinner was
a success, the food was superb.
a failure, the food was inedible.
The headphones sound
fantastic, rich and clear.
dreadful, weak and noisy.
Their new album is
a masterpiece, full of great songs.
a disaster, full of bad songs.
The hike was
a great adventure, we felt wonderful.
a sad mistake, we felt miserable.
The website is
well designed, simple and helpful.
badly designed, complicated and useless.
The bed in the hotel was
soft and perfect, I slept well.
hard and broken, I slept badly.
The tour of the city was
entertaining, with a lovely guide.
tiresome, with an unpleasant guide.
The delivery was
fast, and everything arrived in perfect condition.
late, and everything arrived broken.
The painting on the wall is
elegant and full of life.
hideous and full of mistakes.
The students found the course
enjoyable and very useful.
unbearable and completely useless.
The party was
great, everybody had a good time.
bad, everybody had a hard time.
"""

_FORMAL = """
The message to the landlord said:
I would be grateful if you could repair the heating.
hey, can you fix the heating already?
She wrote to the director:
I respectfully request an appointment at your convenience.
hi, got a minute to chat sometime?
His answer to the invitation was:
I am honoured to accept your kind invitation.
yeah sure, I'll be there!
The note to the guests read:
We kindly ask you to refrain from smoking.
no smoking here, ok guys?
The reply to the customer was:
We sincerely apologise for the inconvenience.
oops, sorry about that!
At the meeting he said:
I regret to inform you that the project is delayed.
so yeah, the project's kinda late.
The assistant told the caller:
The manager is currently unavailable.
the boss isn't around right now.
The letter ended with:
Please accept the assurance of my highest regard.
ok that's it, talk soon!
She asked the stranger:
Would you be so kind as to tell me the time?
hey, what time is it?
The coach told the players:
I must insist that you attend every session.
come on guys, just show up!
He thanked her:
I am deeply indebted to you for your assistance.
thanks a lot, you're awesome!
The complaint said:
I wish to express my dissatisfaction with the service.
man, your service sucks.
The email to the professor began:
Dear Professor, I am writing to enquire about the examination.
hey prof, quick question about the test
The host announced:
It is my pleasure to welcome you this evening.
hey everybody, glad you could make it!
The answer to the offer was:
Unfortunately, I am unable to accept your proposal.
nah, I can't do that, sorry.
The text to the team said:
Kindly submit your reports prior to Friday.
just send me your stuff before Friday, ok?
The clerk informed us:
The documents must be signed in the presence of a witness.
you gotta sign this with someone watching.
The visitor said at the door:
Permit me to introduce myself.
hi there, I'm the new guy.
Her opinion of the plan was:
I have considerable reservations concerning this proposal.
I don't really like it, you know?
He described the party:
The reception was most agreeable.
it was super fun, we had a blast!
The reminder said:
Your prompt payment would be greatly appreciated.
don't forget to pay, thanks!
She told her neighbour:
I should be obliged if you would lower the volume.
can you turn that down, please?
The note on the fridge said:
It is requested that residents label their food.
hey, put your name on your stuff!
The waiter said to the guests:
May I offer you something to drink?
what do you guys want to drink?
The recommendation stated:
The candidate possesses exceptional abilities.
she's really great, you'll love her!
The chairman concluded:
The committee shall reconvene in the autumn.
ok, let's meet again later this year.
The instruction to visitors was:
Visitors are obliged to register upon arrival.
just sign in when you get here.
He answered the question:
I am not at liberty to discuss this matter.
sorry, I can't talk about that stuff.
Her apology was:
Please forgive my regrettable oversight.
my bad, I totally forgot!
The notice in the lift says:
Maintenance will be carried out on the following dates.
we're fixing this thing soon, hang on!
The lawyer advised:
It would be prudent to decline the request.
I'd just say no, really.
The message from the bank said:
We wish to notify you of a change in our conditions.
heads up, some of our rules are new!
The report found:
The results are consistent with previous investigations.
yep, looks pretty much like last time.
He congratulated them:
Allow me to extend my sincere congratulations.
wow, that's great, way to go!
The speaker began:
Ladies and gentlemen, it is a privilege to address you.
hi folks, thanks for coming!
The request to the library was:
I should like to extend the loan of this volume.
can I keep this book a bit longer?
She declined the meeting:
I regret that I have a prior engagement.
can't make it, got other plans!
The announcement said:
The ceremony will commence at noon.
the show kicks off at noon, be there!
The answer to the question was:
To the best of my knowledge, that is correct.
yeah, I guess that's right.
His farewell was:
It has been an honour to serve with you.
bye guys, it's been fun!
"""

PRESETS: Mapping[str, ContrastPreset] = {
    "french": ContrastPreset("French continuation", "English continuation", _FRENCH),
    "sentiment": ContrastPreset("favourable continuation", "unfavourable continuation", _POSITIVE),
    "formality": ContrastPreset("formal continuation", "informal continuation", _FORMAL),
}
"""Presets of contrast pairs, by name."""
