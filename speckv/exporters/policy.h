/* How much to draft in speculative decoding: a policy that was trained with speckv, in C99 without dependencies.
 *
 * Nothing is allocated, nothing is shared: a sequence is a speckv_sequence, and any number of them may be used from any
 * number of threads, each from one at a time. The order of calls, for each sequence:
 *
 *   speckv_start(&s, tokens_of_the_prompt, SPECKV_BF16, cost_ratio);  // or how else the target's weights are stored
 *   repeat for each step:
 *     int most = speckv_choose_gamma(&s, batch_size);  // and no more than the host has room for
 *     for each token of the draft:
 *       if (!speckv_draw_token(&s, entropy, top1, top2, top10)) break;  // asked once its distribution is known
 *       draw the token, which will be verified in any case
 *       if (it was the last one, or !speckv_keep_drafting(&s, probability_of_the_token)) break;
 *     speckv_observe(&s, drafted, accepted, target_entropy, target_margin);  // before the text is cut off at its end
 *
 * cost_ratio is the seconds of a draft forward to those of a one-token target forward, batch_size how many sequences
 * are decoded together. Entropies are in nats, top1, top2 and top10 the probabilities of the likeliest token, the
 * second, and the ten likeliest together, target_margin the difference of the two largest logits behind the last
 * committed token. What the policy does not look at may be 0; SPECKV_READS says what it does.
 */
#ifndef SPECKV_POLICY_H
#define SPECKV_POLICY_H

#include <math.h>
#include <string.h>

@FACTS@

typedef struct {
@FIELDS@
    double survival;          /* the chance that all tokens of the draft so far are right */
    int goes_on;              /* whether another token is to be drafted behind this one */
    double accepted, tried;   /* in this sequence */
    double entropies[SPECKV_LONGEST], top1s[SPECKV_LONGEST];  /* of this draft's tokens */
} speckv_sequence;

static inline double speckv_min(double a, double b) { return a < b ? a : b; }
static inline double speckv_max(double a, double b) { return a > b ? a : b; }
static inline double speckv_logit(double p)
{
    p = speckv_min(speckv_max(p, 1e-4), 1 - 1e-4);
    return log(p / (1 - p));
}
static inline double speckv_sigmoid(double x)
{
    return 1 / (1 + exp(-speckv_min(speckv_max(x, -500), 500)));
}

@TABLES@

@RULES@

/* Begin a sequence: tokens of its prompt, the target's compression, and seconds of a draft forward to a target's. */
static inline void speckv_start(speckv_sequence *s, int context_length, int compression, double cost_ratio)
{
    memset(s, 0, sizeof *s);
    s->context_length = context_length;
    s->compression = compression;
    s->cost_ratio = cost_ratio;
    s->is_first = 1;
    s->running_acceptance = 0.5;
    s->survival = 1;
    s->goes_on = 1;
}

/* At most how many tokens to draft, in a batch of so many sequences. */
static inline int speckv_choose_gamma(speckv_sequence *s, int batch_size)
{
    int gamma;
    s->batch_size = batch_size;
    s->survival = 1;
    s->goes_on = 1;
    s->draft_index = 0;
    gamma = speckv_gamma_rule(s);
    return gamma < SPECKV_LONGEST ? gamma : SPECKV_LONGEST;
}

/* Whether to draw the next token of the draft from this distribution. */
static inline int speckv_draw_token(speckv_sequence *s, double entropy, double top1, double top2, double top10)
{
    const int index = (int)s->draft_index;
    s->draft_index = index + 1;
    s->draft_entropy = entropy;
    s->draft_top1 = top1;
    s->draft_top2 = top2;
    s->draft_top10 = top10;
    if (index < SPECKV_LONGEST) {
        s->entropies[index] = entropy;
        s->top1s[index] = top1;
    }
    return speckv_draw_rule(s);
}

/* Whether to draft another token behind the one just drawn. */
static inline int speckv_keep_drafting(speckv_sequence *s, double probability)
{
    s->draft_probability = probability;
    return s->draft_index < SPECKV_LONGEST && speckv_keep_rule(s);
}

/* Take in what came of a step: 1, or 0 if so many of so many tokens can't have been accepted. That is not taken in. */
static inline int speckv_observe(speckv_sequence *s, int drafted, int accepted, double target_entropy,
                                 double target_margin)
{
    if (accepted < 0 || accepted > drafted) return 0;
    s->position += accepted + 1;
    s->context_length += accepted + 1;
    s->is_first = 0;
    s->last_gamma = drafted;
    s->last_accepted = accepted;
    s->accepted += accepted;
    s->tried += accepted + (accepted < drafted);
    s->running_acceptance = (s->accepted + 1) / (s->tried + 2);
    s->target_entropy = target_entropy;
    s->target_margin = target_margin;
    if (drafted > 0) {
        int i;
        double entropy = 0, top1 = 0, highest = s->entropies[0], lowest = s->top1s[0];
        for (i = 0; i < drafted && i < SPECKV_LONGEST; i++) {
            entropy += s->entropies[i];
            top1 += s->top1s[i];
            highest = speckv_max(highest, s->entropies[i]);
            lowest = speckv_min(lowest, s->top1s[i]);
        }
        s->last_mean_entropy = entropy / drafted;
        s->last_max_entropy = highest;
        s->last_mean_top1 = top1 / drafted;
        s->last_min_top1 = lowest;
    }
    return 1;
}

#endif
