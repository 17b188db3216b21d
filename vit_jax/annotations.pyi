# Made by tools/generated.py from the schema; see annotations.py.
from collections.abc import Sequence
from typing import Any, Literal, Never, TypedDict

from ml_collections import ConfigDict

class _Fields(ConfigDict):
    # No other names: ConfigDict itself takes any.
    def __getattr__(self, attribute: Never) -> Never: ...  # type: ignore
    def __setattr__(self, attribute: Never, value: Never) -> None: ...  # type: ignore

class _Tuple:
    # A list becomes a tuple.
    def __get__(self, section: Any, owner: Any = None) -> tuple[Any, ...]: ...
    def __set__(self, section: Any, value: tuple[Any, ...] | list[Any]) -> None: ...

class ModelSection(_Fields):
    '`config.model`.'
    name: str
    "model: see 'vit_jax models' (default: 'ViT-B/16')"
    num_classes: int | None
    'outputs of the head; 0: no head; in a run by default as many as the data has classes (default: 1000)'
    head_init: Literal['zeros', 'normal'] | None
    "initial head kernel: zeros, or normal with std 0.02 (default: 'zeros')"
    head_bias: float | None
    'initial head bias; -10 for sigmoid loss on many classes (default: 0.0)'
    dtype: Literal['float32', 'bfloat16'] | None
    "type of the computation; parameters are float32 (default: 'float32')"
    dtype_on_cpu: Literal['auto', 'float32', 'same'] | None
    "what CPUs compute in where dtype is bfloat16, which most of them only emulate; auto: float32, or bfloat16 on CPUs with AMX or AVX-512 BF16; same: as dtype (default: 'auto')"
    remat: Literal['auto', 'none', 'save_products', 'save_attention', 'full'] | None
    "which activations are stored for the backward pass: all (none), attention's result and the MLPs' first product (save_products), attention's result (save_attention), only each block's input (full); auto: save_products on CPUs and TPUs, none on GPUs and for convolutions (default: 'auto')"
    unroll: int | None
    'blocks compiled side by side; 0: all (slowest compile); -1: on CPUs all of up to 24 blocks where remat recomputes nothing; else one (default: -1)'
    patch: int | None
    'side of a patch in pixels (default: 16)'
    depth: int | None
    'number of blocks; number of blocks of an exit (default: 12)'
    width: int | None
    'size of a token'
    mlp_dim: int | None
    'hidden size of the MLPs'
    heads: int | None
    'attention heads'
    pool: Literal['token', 'mean', 'map', 'first', 'gem', 'token_mean'] | None
    'how tokens become one vector; token: the class token; token_mean: beside it the mean of the others (DINOv2); first: the first patch, without one; gem: generalised mean, its power learned; map: attention; token: the class token (the other kinds have none); token: the class tokens of model.summary, one after the other; the others read the patches'
    position: Literal['learned', 'learned2d', 'factorized', 'coordinates', 'sincos2d', 'fixed2d', 'relative', 'bias2d', 'transformer_xl', 'deberta', 'none', 'sinusoid'] | None
    "position embeddings; learned: 1-D; learned2d, factorized: columns and rows; coordinates: of patches' centres; relative, bias2d, transformer_xl, deberta: in attention's logits; sinusoid: fixed, over the row number; the others as in ViT; sinusoid: fixed, t2t alone"
    registers: int | None
    'learned tokens without a position'
    distilled: bool | None
    'a token whose head learns from a teacher (default: False)'
    representation: int | None
    'size of a tanh layer before the head; 0: none (default: 0)'
    dropout: float | None
    'after positions, attention and MLP layers (ViT B.1); after the embedding and in the MLPs, after both layers; before the head (default: 0.0)'
    attention_dropout: float | None
    'on the attention weights (default: 0.0)'
    drop_path: float | None
    "stochastic depth of the last block, growing linearly from 0; stochastic depth of the last block's attention, growing linearly from 0; stochastic depth, the same in all blocks of patches; stochastic depth of an exit's last block, growing linearly from 0; stochastic depth, growing linearly from 0 in the first block to this after the last (default: 0.0)"
    attention: Literal['auto', 'xla', 'cudnn', 'short', 'splash'] | None
    "how attention is computed; all give the same. cudnn: GPU, 16 bits; splash: TPU; how attention is computed where there is no Θ; xla where relations are reused. cudnn: GPU, 16 bits (default: 'auto')"
    activation: Literal['gelu_tanh', 'gelu', 'quick_gelu', 'silu', 'relu6', 'hard_swish'] | None
    'of the MLPs; of the MLPs and of the projections of class tokens'
    epsilon: float | None
    'of the norms; of the layer norms'
    keep_class_token: bool | None
    'a class token also where pool reads none: blocks do (EVA, DINOv3) (default: False)'
    pool_prefix: bool | None
    'pool=mean, gem and map read class token and registers beside the patches (default: False)'
    map_heads: int | None
    'heads of attention pooling; 0: as the blocks (default: 0)'
    map_mlp_dim: int | None
    "hidden size of attention pooling's MLP; 0: as the blocks' (default: 0)"
    last_norm: Literal['tokens', 'pooled', 'none'] | None
    'what the last norm norms: all tokens, or their one vector (pooled); none: there is none'
    weighted_layers: bool | None
    "the last norm reads a sum of all layers' outputs, its weights γ·softmax(s) learned, in place of the last one's (default: False)"
    distillation_head: bool | None
    'distilled: the second token has its head; else no head reads it (default: True)'
    patch_bias: bool | None
    'bias of the patch embedding (none in CLIP); bias of the patch embedding'
    patch_norm: bool | None
    'norm on the patches before their positions (AIMv2) (default: False)'
    pre_norm: bool | None
    'norm on all tokens before the blocks (CLIP) (default: False)'
    crop_to_patches: bool | None
    'images that the patches do not divide lose their last rows and columns (SigLIP So400m/14 at 384) (default: False)'
    position_at: Literal['auto', 'stem', 'layers', 'shared'] | None
    "where positions are added: at the stem, in all layers each its own, in all layers the same (shared); auto: of deberta shared, of others in attention's logits in layers, else at the stem (default: 'auto')"
    position_of_class: bool | None
    'the class token has a learned position too (official code; not big_vision) (default: True)'
    position_of_registers: bool | None
    "registers have learned positions too (timm's reg_tokens) (default: False)"
    native_resize: Literal['bilinear', 'bicubic', 'linear'] | None
    "how learned positions become those of an image of a size of its own; bilinear and bicubic with antialiasing, linear without (default: 'bilinear')"
    native_aspect: bool | None
    "images of sizes of their own have positions of the square of their longer side, from its first row and column on (timm's par) (default: False)"
    rope: Literal['none', 'axial', 'centred', 'mixed'] | None
    "rotary positions; axial: integer places (EVA-02); centred: from -1 to 1 (DINOv3); mixed: learned frequencies (2403.13298) (default: 'none')"
    rope_theta: float | None
    'base of their frequencies (100 in DINOv3); mixed: what these begin with (default: 10000.0)'
    rope_grid: _Tuple
    'axial: rows and columns of the grid whose places are spread over the patches, as a rule that of pre-training; (): each grid has its own (default: ())'
    rope_offset: float | None
    'axial: the first row and column (1 in Perception Encoders) (default: 0.0)'
    rope_registers: float | None
    'axial: base of the frequencies of registers, rotated as a square grid of their own (100 in ViT-5); 0: they are not rotated (default: 0.0)'
    rope_shift: float | None
    'centred: in training, places are shifted by up to this much, rows and columns apart (DINOv3) (default: 0.0)'
    rope_jitter: float | None
    'centred: in training, rows and columns are each multiplied by a factor between this and its inverse; 0: none (default: 0.0)'
    rope_rescale: float | None
    'centred: in training, rows and columns are multiplied by one factor between this and its inverse (2 in DINOv3); 0: none (default: 0.0)'
    parallel: bool | None
    'attention and MLP side by side on one norm (ViT-22B) (default: False)'
    block_branches: int | None
    'attentions and MLPs side by side (2203.09795) (default: 0)'
    differential: bool | None
    'attention is a difference of two (2410.05258) (default: False)'
    norm: Literal['layer', 'rms'] | None
    "kind of all norms; rms: without mean and bias (1910.07467) (default: 'layer')"
    norm_bias: bool | None
    "biases of the encoder's layer norms (none in ViT-22B) (default: True)"
    norm_after: bool | None
    'post-norm: normalise the outputs of attention and MLP (EVA-02-E, Swin V2) (default: False)'
    norm_residual: bool | None
    'normalise sums of input and output (BERT) (default: False)'
    qk_norm: bool | None
    'norm on queries and keys (ViT-22B) (default: False)'
    attention_inner_norm: bool | None
    "norm on the heads' results before their projection (BEiT-3) (default: False)"
    mlp_inner_norm: bool | None
    "norm on the MLPs' hidden layer (BEiT-3, EVA-02) (default: False)"
    qkv_bias: bool | None
    "biases of the blocks' QKV projections (none in ViT-22B); biases of the blocks' QKV projections (T2T has none, DeiT has them)"
    key_bias: bool | None
    'qkv_bias: keys have them too (not in BEiT and EVA) (default: True)'
    projection_bias: bool | None
    "biases of attention's last layer and of the MLPs (none in AIMv2) (default: True)"
    gated_mlp: bool | None
    'a further product in the MLPs, whose activation multiplies the first; with activation=silu SwiGLU (2002.05202) (default: False)'
    layer_scale: Literal['none', 'all', 'attention'] | None
    "which residuals are multiplied by a learned number for each channel (2103.17239) (default: 'none')"
    layer_scale_init: float | None
    'what these numbers begin as (1e-4 in ViT-5); what LayerScale begins as (1e-6 in S36 and M) (default: 1e-05)'
    token_merging: int | None
    'patches that each block merges with those most like them (ToMe, 2210.09461): less work (default: 0)'
    drop_path_by: Literal['depth', 'constant'] | None
    "how drop_path is spread over the blocks; depth: growing linearly from 0; constant: the same in every block (DeiT III) (default: 'depth')"
    init: Literal['vit', 'deit'] | None
    "initial weights of patch embedding, tokens and blocks; vit: as the ViT paper's code; deit: as DeiT's, kernels and tokens normal with std 0.02 (default: 'vit')"
    units: _Tuple
    'residual units of each stage of the ResNet; each but the first has stride 2; blocks of each stage of the EfficientNet, at most seven of them; the first may have stride 2'
    width_factor: float | None
    "the ResNet's channels, as a multiple of 64 in its root and first stage; the EfficientNet's channels, as a multiple of B0's (default: 1.0)"
    epsilons: Literal['official', 'timm'] | None
    "those that its ResNet is normalised with; timm's move logits by 1e-4; those that group norms and kernels are normalised with; timm's move logits by 1e-4 in hybrids (default: 'official')"
    token_mlp_dim: int | None
    "hidden size of a Mixer's token MLPs; K² times that of weights from images K times smaller; hidden size of the MLPs over tokens; 0: four times the tokens"
    preactivation: bool | None
    'normalise before each convolution (BiT, ResNet v2), not after it (ResNet v1) (default: True)'
    root_zeros: bool | None
    "zeros around what BiT's root pools (BiT's first code, timm; not big_vision) (default: False)"
    fixed_statistics: bool | None
    'batch norms use their running statistics in training too, and leave them as they are: for fine-tuning with small batches or a frozen body (default: False)'
    stages: _Tuple
    'how many blocks have no re-attention, how many after them have it, and so on by turns (default: (0, 16))'
    conv_stem: bool | None
    'two convolutions with batch norm before the patches (DeepViT-S, L) (default: False)'
    reattention_norm: bool | None
    'batch norm of the attention maps after Θ (default: True)'
    scaled_maps: bool | None
    "maps after Θ are divided by the root of a head's size (DeepViT-S) (default: False)"
    residual_scale: float | None
    'a in x + f(norm(a x)) / a, of attention and MLP (DeepViT-S, L: 0.5) (default: 1.0)'
    gate: Literal['none', 'se', 'eca', 'eca_hard'] | None
    "of an MLP's channels, by their means over the image: squeeze-excite, efficient channel attention with a sigmoid or a hard one (default: 'se')"
    reduction: int | None
    'gate=se: hidden channels over those between (default: 192)'
    small_patch: int | None
    'side of a patch of the small branch, in pixels (default: 12)'
    small_width: int | None
    'size of a token of the small branch (default: 192)'
    small_mlp_dim: int | None
    "hidden size of the small branch's MLPs (default: 768)"
    depths: _Tuple
    'blocks in each stage: (of the small branch, of the large branch) (default: ((1, 4), (1, 4), (1, 4)))'
    large_image_size: int | str | tuple[Any, ...] | None
    'image size of the large branch, in the form of image_size; 0: one patch less than image_size, in whole patches (240: 224, 408: 384, 504: 480) (default: 0)'
    convolutional_stem: bool | None
    "patches are embedded by three convolutions (the paper's †) (default: False)"
    qk_scale: float | None
    "what multiplies the products of queries and keys in the blocks; 0: 1/√(channels of a head). The authors' code takes 1/√width where it is called with pretrained=True (default: 0.0)"
    first_split: _Tuple
    'windows of the image: their side, stride and padding, in pixels (default: (7, 4, 2))'
    token_width: int | None
    'size of a token between the splits; t2t: size of a token between the splits (default: 64)'
    token_attention: Literal['performer', 'full'] | None
    "attention between the splits; full: of all pairs of tokens (default: 'performer')"
    random_features: int | None
    'fixed directions of a performer; half of token_width; t2t: fixed directions of a performer (default: 32)'
    token_bias: bool | None
    'biases of the QKV projections between the splits (default: True)'
    token_dropout: float | None
    'after attention and MLP of the layers between the splits; t2t: after attention and MLP of the layers between the splits (default: 0.1)'
    class_depth: int | None
    'blocks in which the class token reads the patches (default: 2)'
    class_tokens: int | None
    'class tokens, one for each teacher of summaries (default: 3)'
    summary: _Tuple
    "which class tokens are the image's vector, from 0 (default: (0, 1))"
    table_side: int | None
    'rows and columns of the table of positions (default: 128)'
    table_corners: bool | None
    'the table is resized with its corners in place (C-RADIOv3-B and -H) (default: False)'
    feature_reuse: bool | None
    'MLPs see the features of the exit before (default: True)'
    feature_hidden: int | None
    'hidden size of the MLPs that prepare features (default: 128)'
    feature_width: int | None
    'size of prepared features (default: 48)'
    relation_reuse: bool | None
    'attention logits of the exit before become biases (default: True)'
    backbone: Literal['t2t', 'deit'] | None
    "network of each exit (default: 't2t')"
    grids: _Tuple
    'tokens of a side at each exit, such as 7,10,14; or (down, across) of each (default: (7, 10, 14))'
    windows: _Tuple
    'side, stride and padding of the windows of the image at each exit; (): those that give the grids (default: ())'
    position_grid: _Tuple
    'rows and columns of the table of positions, which is resized to those of the patches (default: (14, 14))'

class ObjectiveSection(_Fields):
    '`config.objective`.'
    name: str
    "objective (default: 'supervised')"
    loss: Literal['softmax', 'sigmoid', 'binary'] | None
    "cross-entropy: softmax; sigmoid, summed over classes; binary, its mean over classes, where every class in a mixed image counts fully (DeiT III); with the labels: cross-entropy, softmax or sigmoid; of all pairs of a batch: SigLIP's or CLIP's"
    label_smoothing: float | None
    "share of the target spread evenly over all classes; share of the labels' target spread evenly over all classes (default: 0.0)"
    focal: float | None
    'focal loss: easy examples count (1 - p)^focal; 0: all count alike (default: 0.0)'
    class_weights: _Tuple
    'what each class counts in the loss, in the order of the classes; (): 1 (default: ())'
    masked: float | None
    'share of the patches that are removed (default: 0.75)'
    normalize: bool | None
    "targets are a patch's pixels minus their mean, over their deviation (default: True)"
    width: int | None
    'size of a token in the decoder; multilevel: channels of the fused map'
    depth: int | None
    'number of blocks in the decoder (default: 8)'
    heads: int | None
    'attention heads in the decoder (default: 16)'
    mlp_ratio: int | None
    "hidden size of the decoder's MLPs over its width (default: 4)"
    target: Literal['mean_color', 'downsized', 'full'] | None
    "what is predicted of a patch (default: 'mean_color')"
    corrupted: float | None
    'share of the patches that are corrupted (default: 0.5)'
    prototypes: int | None
    'outputs of a head (default: 65536)'
    head_hidden: int | None
    'hidden size of a head (default: 2048)'
    bottleneck: int | None
    'size of what is compared with prototypes (default: 256)'
    head_std: float | None
    "standard deviation of a head's kernels at first; small heads need a larger one, or biases soon outweigh what differs between images (default: 0.02)"
    two_heads: bool | None
    'patches have a head of their own (default: False)'
    centering: Literal['centre', 'sinkhorn'] | None
    "how the teacher's outputs are kept apart: less a moving centre, or by Sinkhorn-Knopp (default: 'centre')"
    centre_momentum: float | None
    'of the centre (default: 0.9)'
    student_temperature: float | None
    "the student's logits are divided by it (default: 0.1)"
    teacher_temperature: _Tuple
    "the teacher's: at first, and after temperature_warmup (default: (0.04, 0.07))"
    temperature_warmup: str | None
    "how long the teacher's temperature rises (default: '30 epochs')"
    momentum: _Tuple
    'of the teacher, at the beginning and at the end; a cosine between; weight of a batch in the moments at the beginning and the end'
    frozen_prototypes: str | None
    "how long prototypes stay as they are at first (default: '1 epoch')"
    patch_weight: float | None
    'of the loss of masked patches; 0: none (default: 1.0)'
    mask_shares: _Tuple
    'smallest and largest share of patches that are masked (default: (0.1, 0.5))'
    koleo: float | None
    'weight of KoLeo; 0: none (default: 0.1)'
    koleo_images: int | None
    'how many images KoLeo compares with each other; 0: the whole batch, or with config.accumulate each part of it (default: 0)'
    view_resize: Literal['torch', 'dinov2'] | None
    "how positions are interpolated for views of other sizes (default: 'dinov2')"
    gram_weight: float | None
    'of Gram anchoring: patches stay as alike to each other as an earlier checkpoint has them; 0: none (2 in DINOv3) (default: 0.0)'
    gram_teacher: str | None
    "that checkpoint, of the same model; '': the model as it is when anchoring starts (default: '')"
    gram_start: str | None
    "how long there is no Gram anchoring at first (default: '0 steps')"
    gram_refresh: str | None
    "after so long the Gram teacher takes the teacher's weights, again and again; 0: never (10,000 steps in DINOv3) (default: '0 steps')"
    gram_refreshes: int | None
    'gram_refresh: how often at most (default: 3)'
    collapse_steps: int | None
    'warn after this many steps of identical teacher outputs (collapse) (default: 100)'
    teacher: str | None
    "checkpoint of any format and family that classifies the same classes (default: '')"
    kind: Literal['hard', 'soft'] | None
    "the teacher's decision, or its probabilities (default: 'hard')"
    alpha: float | None
    "the teacher's share of the loss (default: 0.5)"
    temperature: float | None
    'soft: logits are divided by it; by which cosines are multiplied at the beginning; 0: 10, or 1/0.07 of softmax'
    teachers: _Tuple
    'checkpoints of any format and family, with or without a head (default: ())'
    kinds: _Tuple
    "features that are learned: summary, of the whole image; patches (default: ('summary', 'patches'))"
    adaptor: Literal['ladder', 'block', 'mlp', 'linear'] | None
    "from the student's features to a teacher's: an MLP of every layer, added up; or of the last layer an MLP, a transformer block and a linear layer, or a linear layer (default: 'ladder')"
    hidden: int | None
    "hidden size of the ladder's MLPs (default: 768)"
    last_hidden: int | None
    "that of the last layer's (default: 3072)"
    standardize: Literal['moments', 'phi_s', 'none'] | None
    "teachers' features: by running moments of each channel; by PHI-S, a rotation and one scale; or not (default: 'moments')"
    sample: int | None
    'batches from which PHI-S is computed; until then nothing is learned (default: 100)'
    cosine: float | None
    'share of the cosine distance in the loss; the rest is smooth L1 (default: 0.5)'
    drop: float | None
    'probability that an image does not learn from a teacher, save from that of its largest loss (default: 0.5)'
    tokenizer: str | None
    "how captions become tokens: a tokenizer.json, a SentencePiece .model, the folder of one, or 'bytes' of UTF-8; as of image_text, if that is a term; '': it is none"
    text: Literal['siglip', 'clip'] | None
    "the text tower: tokens that see all others, the last one read, or those before them, the end token read (default: 'siglip')"
    text_length: int | None
    'tokens of a text; longer ones are cut (default: 64)'
    vocabulary: int | None
    "rows of the table of tokens; 0: the tokenizer's (default: 0)"
    tokenizer_digest: str | None
    "fingerprint of the tokens, which a run keeps: no tokenizer with others is taken (default: '')"
    text_end: int | None
    "token at the end of a text; -1: the tokenizer's (default: -1)"
    text_pad: int | None
    "token after the end; -1: the tokenizer's (default: -1)"
    text_width: int | None
    'size of a token; 0: as of the image tower (default: 0)'
    text_depth: int | None
    'number of blocks; 0: as of the image tower (default: 0)'
    text_mlp_dim: int | None
    'hidden size of the MLPs; 0: as of the image tower (default: 0)'
    text_heads: int | None
    'attention heads; 0: as of the image tower (default: 0)'
    text_activation: Literal['', 'gelu_tanh', 'gelu', 'quick_gelu'] | None
    "activation of the text tower's MLPs; '': gelu_tanh as SigLIP's, quick_gelu as OpenAI's CLIP (gelu in most of open_clip's) (default: '')"
    image_blocks: int | None
    "blocks on the tokens of the image tower, which itself computes as in evaluation; an image's vector is then their class token beside the mean of their patches (dino.txt); 0: none (default: 0)"
    image_drop_path: float | None
    'stochastic depth of each of these blocks (default: 0.0)'
    embed: int | None
    "size of both vectors, images projected too; 0: the image tower's width, of image_blocks twice that (default: 0)"
    bias: float | None
    'added to them at the beginning (default: -10.0)'
    terms: _Tuple
    "(name, options) of objectives; besides their own options weight (1) and start, a duration before which a term does not count: (('image_text', {}), ('features', {'teachers': ('RUN',), 'weight': 0.5, 'start': '80%'})) (default: ())"
    rest: bool | None
    "whether a late term's own parameters rest until its start, without decay, and their optimizer counts from there; runs of earlier versions keep False (default: True)"
    view: int | None
    'beside a term of several views: which of config.data.views the other terms see; that term sees the rest (default: 0)'
    head: Literal['eomt', 'linear', 'multilevel'] | None
    "what reads maps off the model: queries in its last blocks (EoMT), a linear layer, or several layers fused (default: 'eomt')"
    layers: _Tuple
    'multilevel: layers that are fused, by number or name; (): four, evenly spaced, the last included (default: ())'
    queries: int | None
    'eomt: how many queries there are (default: 100)'
    blocks: int | None
    'eomt: last blocks that queries go through (default: 4)'
    segments: int | None
    'eomt: of an image at most this many classes are learned, the largest; of panoptic masks no image may have more segments (default: 40)'
    enlarge: Literal['scores', 'masks'] | None
    "eomt: what is enlarged to pixels; scores: sums over queries; masks: each query's, to the size of the model's images, before they are summed, as the authors do: better where things are small, slower (default: 'scores')"
    points: int | None
    'eomt: points at which masks are compared, about (default: 12544)'
    annealing: _Tuple
    'eomt: from which to which share of the run masked attention is switched off, block by block (default: (0.16666666666666666, 0.8333333333333334))'
    mask_weight: float | None
    'eomt: of the cross-entropy of masks (default: 5.0)'
    dice_weight: float | None
    'eomt: of the dice loss of masks (default: 5.0)'
    class_weight: float | None
    "eomt: of the cross-entropy of queries' classes (default: 2.0)"
    no_object: float | None
    'eomt: in that cross-entropy, the weight of queries without a segment (default: 0.1)'

class DataSection(_Fields):
    '`config.data`.'
    name: str
    "'digits', 'folder', 'prepared', 'tar', 'masks', 'mixture', or a data set of TFDS such as 'imagenet2012' (default: 'digits')"
    path: str
    "folder: of images or classes, or a list; prepared: the folder; tar: files; TFDS: ~/tensorflow_datasets (default: '')"
    image_feature: str
    "TFDS: the feature with the image; '': 'image', or else the only one with three channels (default: '')"
    mask_feature: str
    "TFDS: the feature with the mask; 'auto': the only picture beside the image; '': none, labels are classes (default: '')"
    mask_table: str
    "TFDS: a CSV file that names the values or colours of masks, such as classes.csv; '': as the data set does (default: '')"
    mixture: _Tuple
    "with name='mixture': ((name or path, weight), …); weights are shares of the examples (default: ())"
    train_split: str
    "examples to train on; slices as in TFDS: 'train[:99%]', 'train[1000:]' (default: 'train')"
    eval_split: str
    "examples to evaluate on (default: 'test')"
    holdout: float
    "folder, list or tar files without splits: the share held out as 'test', chosen by file name (default: 0.1)"
    holdout_from: str
    "data with splits, but none to judge by: the split that 'test' is held out of, such as train; '': none (default: '')"
    layout: Literal['auto', 'classes', 'splits', 'parts']
    "folders are classes, splits, parts that all hold the same classes, or auto: as their names say, or ask (default: 'auto')"
    mask_files: Literal['ask', 'skip', 'keep']
    "files named like masks of images beside them (0_mask.png, 0.seg.png): skip, keep as examples, or ask (default: 'ask')"
    label_separator: str
    "between several labels of an image in a list, such as '|'; '': ';' in a column labels (default: '')"
    class_order: Literal['ask', 'numbers', 'texts']
    "of class folders, for a checkpoint without names: numbers (2 before 10), texts (10 before 2), or ask (default: 'ask')"
    holdout_by: Literal['file', 'class']
    "file: each image by itself; class: the same share of every class (default: 'file')"
    examine: bool
    'folder or list on a disk: all images are read once before the first step; unreadable ones, copies and conflicting labels are listed, and a hash of the content decides what is held out: copies stay together (default: False)'
    sampling: Literal['uniform', 'balanced']
    "in an epoch of training, uniform: every example once; balanced: every class equally often (default: 'uniform')"
    image_size: int | str | tuple[Any, ...]
    'the images that the model sees, in pixels: 224, or height x width: 224x448 (default: 224)'
    size_schedule: _Tuple
    'other sizes of training images by step: ((0, 128), (0.4, 160), (0.7, 192), (0.9, 224)), each from a share of the run on, the last image_size; batch and rate stay; (): image_size throughout (default: ())'
    patch_sizes: _Tuple
    "patches of the model by step, in pixels: (48, 30, 16, 8), one size a step, drawn by seed and step; ((48, 1), (8, 3)) with shares of the steps; (): the model's own (FlexiViT) (default: ())"
    native_tokens: int
    'images, and crops of them, keep their aspects, each at up to so many patches; 0: all are cut to image_size (default: 0)'
    native_lengths: _Tuple
    'other numbers in training, (128, 256, 576): one a batch, drawn by seed and step, each equally often or by its share: ((128, 1), (256, 2)); (): native_tokens (default: ())'
    native_budget: int
    'patches of a batch of as many images as they allow; loss and rate stay relative to batch_size; 0: batch_size (default: 0)'
    native_multiple: int
    'native_budget: images in a batch are a multiple of this (default: 8)'
    native_loss: Literal['none', 'sqrt', 'linear']
    "native_budget: by what the loss of a batch is multiplied, its share of batch_size images (default: 'linear')"
    native_rate: Literal['none', 'sqrt', 'linear']
    "native_budget: the same of its learning rate (default: 'none')"
    native_patch: int
    "side of those patches; 0: the model's (default: 0)"
    channels: int
    'of an image: 3 for RGB, 1 for grey, or as many as its PNG (2, 4), TIFF or .npy file has (default: 3)'
    train_crop: Literal['inception', 'random', 'pad', 'resize', 'jitter']
    "how training images are cut (default: 'inception')"
    crop_scale: _Tuple
    'jitter crop: smallest and largest factor by which an image is enlarged; at 1 it just fits (default: (0.1, 2.0))'
    crop_area: _Tuple
    "inception crop: smallest and largest share of the image's area (default: (0.05, 1.0))"
    crop_aspect: _Tuple
    "inception crop: narrowest and widest aspect ratio, times that of image_size; native_tokens: the image's (default: (0.75, 1.3333333333333333))"
    resize: int
    'random crop: the smaller side is first resized to this (default: 256)'
    interpolation: Literal['bilinear', 'bicubic', '']
    "antialiased filter that resizes crops: bilinear, bicubic; '': as init_from has it (default: 'bilinear')"
    repeats: int
    'how many times an example is in a batch, each time with another crop (DeiT: 3) (default: 1)'
    views: _Tuple
    "several views of each image, for objectives that compare them: ({option: value}, …), what differs from config.data and config.augment, and 'count', how many there are of this kind; (): one image (default: ())"
    view_sizes: _Tuple
    "other sizes of views, in a share of the steps: ({'share': 0.3, 'sizes': (512, 512, 112), 'start': '50%'}, …), an image_size for each of views; which it is, is drawn by seed and step; (): always those of views (default: ())"
    pad: int
    'pad crop: zero border, in pixels, from which the crop is cut (default: 4)'
    eval_crop: Literal['central', 'torchvision', 'transformers', 'squash', 'resize']
    "in evaluation: central, torchvision, transformers (by their rounding), squash (to the aspect), resize (all) (default: 'central')"
    eval_resize: int
    'all but resize: the smaller side is first resized to this (default: 256)'
    mean: _Tuple
    'subtracted from pixels in [0, 1], for each channel or all; 0.5 with std 0.5: [-1, 1]; (): as init_from has it (default: (0.5, 0.5, 0.5))'
    std: _Tuple
    'what is left is divided by this, one number for each channel or one for all; (): as init_from has it (default: (0.5, 0.5, 0.5))'
    permute: Literal['none', 'patches', 'pixels in patches', 'both', 'all pixels']
    "a fixed permutation of what the model sees (experiments): none, patches, pixels in patches, both, all pixels (default: 'none')"
    permute_patch: int
    'permute: side of its patches in pixels (default: 16)'
    threads: int
    'threads that decode batches; 0: one for each core of the process (default: 0)'
    read_ahead: float
    'MiB of images that each process reads before they are decoded; 0: none; -1: by the time that a read takes (default: -1.0)'
    cache: str
    "folder on a local disk that keeps what was read, for data in buckets or on slow disks; '': none (default: '')"
    cache_gib: float
    'cache: at most this many GiB (default: 100.0)'
    prefetch: int
    'batches kept ready on the devices (default: 2)'
    max_pixels: int
    'an image of more pixels, by its header, counts as unreadable before it takes memory (default: 67108864)'
    max_value: int
    'images of 16 bits: their largest value, 4095 where 12 bits are used; 0: 65535, with a warning below 2^14 (default: 0)'
    on_bad_image: Literal['error', 'skip']
    "an unreadable image ends the run (error), or another takes its place, in evaluation none (skip) (default: 'error')"
    max_bad_images: int
    'with skip: how many are tolerated, in training and in each evaluation, before the run ends with an error (default: 100)'

class PseudoSection(_Fields):
    '`config.pseudo`.'
    teacher: str
    "checkpoint of any format that labels them, or another run of the same recipe, by its name; '': there are none (default: '')"
    data: str
    "the images: a name or path, as in a mixture; '': those of config.data (default: '')"
    split: str
    "which of them; labels that they have are not looked at (default: 'train')"
    confidence: float
    'the most probable class of an image has to be more probable than this (default: 0.3)'
    per_class: int
    'this many images of each class: the most confident, or all of them over and over; 0: all, once (default: 0)'
    soft: bool
    "the teacher's probabilities are learned, not its decision (default: True)"
    ratio: float
    'in an epoch, images labelled by the teacher for one of config.data (default: 1.0)'

class AugmentSection(_Fields):
    '`config.augment`.'
    flip: bool
    'mirror left-right with probability 1/2 (default: True)'
    color_jitter: float
    'strength of random brightness, contrast, saturation; 0: none (default: 0.0)'
    jitter: _Tuple
    "strengths of random brightness, contrast, saturation and hue, such as DINO's (0.4, 0.4, 0.2, 0.1); (): none (default: ())"
    jitter_probability: float
    'share of the images that jitter changes (default: 0.8)'
    grey: float
    'probability that an image becomes grey (default: 0.0)'
    blur: float
    'probability of a Gaussian blur, its deviation 0.1 to 2 pixels (default: 0.0)'
    solarize: float
    'probability that values from 128 on are inverted (default: 0.0)'
    randaugment_layers: int
    'RandAugment operations; 0: none (default: 0)'
    randaugment_magnitude: float
    'RandAugment strength, of 10 (AugReg goes to 20) (default: 10.0)'
    randaugment_kind: Literal['tensorflow', 'timm', 'timm-inc1']
    "whose operations and magnitudes: tensorflow (AugReg, big_vision); timm's 'rand-…', or its '-inc1' (default: 'tensorflow')"
    randaugment_std: float
    "timm's 'mstd': standard deviation of the magnitudes, which are then clipped to [0, 10] (default: 0.0)"
    autoaugment: bool
    'AutoAugment, the policy for ImageNet (default: False)'
    three_augment: bool
    '3-Augment (DeiT III): each image grey, solarised or blurred (default: False)'
    own: _Tuple
    'names of registered augmentations, in their order, after the changes of colours (default: ())'
    mixup: float
    'parameter of the Beta distribution of mixup; 0: none (default: 0.0)'
    cutmix: float
    'parameter of the Beta distribution of cutmix; 0: none (default: 0.0)'
    mix_switch: float
    'with both mixup and cutmix: probability that a step uses cutmix (default: 0.5)'
    erasing: float
    'probability that a random rectangle is replaced by noise (default: 0.0)'
    erasing_mode: Literal['pixel', 'rand', 'const']
    "noise of each pixel, one random colour, or the mean colour (default: 'pixel')"
    erasing_area: _Tuple
    'erasing: smallest and largest share of the image (default: (0.02, 0.3333333333333333))'
    erasing_aspect: float
    'erasing: narrowest aspect ratio; the widest is its inverse (default: 0.3)'

class OptimSection(_Fields):
    '`config.optim`.'
    name: str
    "adamw, nadamw, schedule_free, lamb, lars, sgd, adafactor, lion or rmsprop; of matrices muon, adamuon, normuon, shampoo or soap (default: 'adamw')"
    lr: float
    'peak learning rate (default: 0.001)'
    schedule: Literal['cosine', 'linear', 'polynomial', 'rsqrt', 'constant', 'staircase']
    "shape of the learning rate after warm-up (default: 'cosine')"
    warmup: str
    "linear rise from 0 to the peak: steps, epochs, examples or % (default: '0 steps')"
    late: _Tuple
    'patterns of parameters that rest during the warm-up, while new heads learn, and then have a warm-up of their own, late_warmup (default: ())'
    late_warmup: str
    "late: how long these parameters rise from 0 to the peak, once the warm-up is over (default: '0 steps')"
    cooldown: str
    "linear fall to 0 at the end, for rsqrt and constant (default: '0 steps')"
    timescale: str
    "rsqrt: lr / sqrt(1 + (step - warmup) / timescale) (default: '10000 steps')"
    boundaries: _Tuple
    'staircase: when the learning rate falls; steps, epochs, examples or %, warm-up included (default: ())'
    factor: float
    'staircase: what it is multiplied by each time (default: 0.1)'
    power: float
    'polynomial: lr * (1 - p) ^ power, p from 0 to 1 after warm-up (default: 0.9)'
    lr_end: float
    'cosine, linear and polynomial: the learning rate at the end (default: 0.0)'
    b1: float
    'adamw, nadamw, lamb, lion, adafactor: decay of the first moment; sgd, lars, rmsprop: momentum; schedule_free: how far the gradient is taken towards the mean (default: 0.9)'
    b2: float
    'adamw, nadamw, schedule_free, lamb, lion, rmsprop: decay of the second moment; adafactor: its cap (default: 0.999)'
    eps: float
    'adamw, nadamw, schedule_free, lamb, and those of matrices but muon: added to the root of the second moment; rmsprop: to the moment itself (default: 1e-08)'
    matrices: _Tuple
    'patterns of the parameters that are matrices; not given: kernels, but not embeddings and heads (default: ())'
    others: Literal['adamw', 'nadamw']
    "optimizer of what is not a matrix, with b1, b2 and eps (default: 'adamw')"
    matrix_b1: float
    'decay of the momentum of matrices (default: 0.95)'
    matrix_b2: float
    'adamuon, normuon, shampoo, soap: decay of the second moments of matrices (default: 0.95)'
    nesterov: bool
    'whether the momentum of matrices looks one update ahead (default: True)'
    polynomial: Literal['polar_express', 'jordan']
    "muon, adamuon, normuon: what orthogonalizes a matrix, in five steps (default: 'polar_express')"
    matrix_scale: Literal['rms', 'original']
    "muon, adamuon, normuon: rms: elements of an update are as large as AdamW's, whose lr and weight_decay can stay; original: singular values are 1, or more for matrices with more outputs than inputs (default: 'rms')"
    matrix_dtype: Literal['bfloat16', 'float32']
    "in which matrices are multiplied; CPUs that would emulate bfloat16 take float32 (default: 'bfloat16')"
    matrix_every: int
    'shampoo: steps from one computation of the roots to the next (default: 100)'
    basis_every: int
    'soap: steps from one refresh of the eigenbases to the next (default: 10)'
    matrix_eps: float
    'shampoo, soap: added to the eigenvalues of second moments, times the largest of them or the norm (default: 1e-06)'
    matrix_block: int
    'shampoo, soap: longest side of the blocks that matrices are split into (default: 1024)'
    per_head: bool
    "whether each head's queries, keys, values and outputs are a matrix of their own (default: False)"
    moment_dtype: Literal['float32', 'bfloat16']
    "type the first moment is kept in (default: 'float32')"
    clip: float
    'largest global norm of the gradient; 0: no clipping (default: 1.0)'
    weight_decay: float
    'weight decay, see weight_decay_by (default: 0.0)'
    weight_decay_end: float | None
    'weight decay at the end, a cosine away from weight_decay; not given: it stays'
    weight_decay_rules: _Tuple
    "(pattern, multiplier): what decays and how much; others do not (default: (('.*kernel', 1.0),))"
    weight_decay_by: Literal['lr', 'schedule', 'gradient']
    "decoupled decay, multiplied by the learning rate (papers, AdamW) or the schedule alone (big_vision); or gradient: added to the gradient after clipping, as that of a squared norm in the loss is (default: 'lr')"
    lr_rules: _Tuple
    '(pattern, multiplier) of the learning rate; others 1 (default: ())'
    freeze: _Tuple
    'patterns of parameters that stay as they are; of some layers encoder/layers[:4]/.* (default: ())'
    layer_decay: float
    'layer-wise decay of the learning rate, from the head down; 1: none (default: 1.0)'
    sam_rho: _Tuple
    'sharpness-aware training (SAM, GSAM), two gradients a step: radius at lr_end and at lr; (0, 0): none (default: (0.0, 0.0))'
    sam_alpha: float
    'GSAM: weight of the step that lowers the loss less its highest nearby; 0: SAM (default: 0.0)'
    ema: float
    'Polyak averaging: decay of the averaged parameters, which are then evaluated; 0: none (default: 0.0)'

class LoraSection(_Fields):
    '`config.lora`.'
    lora_rank: int
    'rank of the adapters of the layers that lora_targets names; 0: none, the model is trained itself (default: 0)'
    lora_targets: _Tuple
    "patterns of the layers with adapters: '.*/query', '.*/key', '.*/value', or names such as layers/mlp/up (default: ('.*/query', '.*/value'))"
    also: _Tuple
    "patterns of the parameters that are trained beside the adapters (default: ('(exit_\\\\d+/)?head(_distilled)?/.*',))"

class MeshSection(_Fields):
    '`config.mesh`.'
    data: int
    'replicas of the parameters (default: -1)'
    fsdp: int
    'devices that parameters are sharded over, too; with data=-1, all where there are fewer (default: 1)'
    tensor: int
    'devices that heads and MLP width are sharded over (default: 1)'
    fsdp_min_size: int
    'arrays with fewer elements are not sharded over data and fsdp (default: 65536)'
    gradients: Literal['float32', 'bfloat16']
    "GPUs: type in which gradients of kernels are added over devices; bfloat16 halves the traffic and rounds sums (default: 'float32')"

class EvalSection(_Fields):
    '`config.eval`.'
    every: str
    "how often: steps, epochs, examples or %; 0: at the end only (default: '0 steps')"
    batch_size: int
    'over all devices and hosts; 0: as in training (default: 0)'
    evaluators: _Tuple
    'what is measured: names, or (name, {option: value}); of accuracy, loss, few_shot, knn, early_exit; (): accuracy, or of what is learned without labels the loss (default: ())'
    best: str
    "the metric by which models are compared, e.g. knn/accuracy; METRIC:min or METRIC:max where its evaluator does not say which is good; '': the main metric of the first evaluator (default: '')"
    patience: int
    'early stopping: end the run after this many evaluations without a better one; 0: never (default: 0)'
    thresholds: _Tuple
    'of a model with sigmoids: how probable each class has to be to count as predicted, in the order of the classes; (): 0.5 (default: ())'
    target: float | None
    'end the run at the first evaluation whose eval.best is as good as this, e.g. 0.6 of accuracy; not given: never'

class CheckpointSection(_Fields):
    '`config.checkpoint`.'
    every: str
    "how often to save: steps, epochs, examples or %; 0: at the end only (default: '1000 steps')"
    every_minutes: float
    'also save when this many minutes have passed since the last save; 0: never (default: 0.0)'
    local: str
    "folder on a local disk or RAM disk of each host for checkpoints that are saved more often; '': none (default: '')"
    local_every: str
    "how often to save to checkpoint.local: steps, epochs, examples or %; 0: never (default: '20 steps')"
    keep: int
    'how many of the last are kept (default: 3)'
    best: bool
    'also keep the checkpoint of the best evaluation (eval.best): WORKDIR/best (default: False)'
    keep_every: int
    'steps divisible by this are kept forever; 0: none (default: 0)'
    keep_for_followers: int
    'how many older checkpoints each `evaluate --follow` may hold until it has read them; 0: none (default: 10)'
    max_failures: int
    'how many consecutive saves may fail before the run ends with an error (default: 3)'
    commit_minutes: float
    'how long the first process may take to merge and commit what all processes have written (default: 5.0)'
    on_config_change: Literal['error', 'allow']
    "resuming with a config that would change the result (default: 'error')"

class LogSection(_Fields):
    '`config.log`.'
    every: str
    "how often metrics are read from the devices and written (default: '50 steps')"
    tensorboard: bool
    'write TensorBoard event files (default: True)'
    images: str
    "how often images of the batch are written to TensorBoard as the model sees them, with masks if they have any; 0: never (default: '0 steps')"
    histograms: str
    "how often histograms of parameters, gradients and updates are written there; each costs about a step more; 0: never (default: '0 steps')"
    wandb: str
    "project of Weights & Biases where metrics go too (extra 'wandb' of the installation); '': nowhere (default: '')"
    parameters: bool
    'print a table of all parameters, with their shapes and shardings, at the start (default: False)'
    profile: _Tuple
    '(first, last) step to record a trace of, into WORKDIR/profile (default: ())'

class HostsSection(_Fields):
    '`config.hosts`.'
    heartbeat_seconds: int
    'a process without a heartbeat for this long is considered dead (default: 60)'
    wait_minutes: float
    'how long processes wait for each other at a barrier (default: 20.0)'
    step_minutes: float
    'without a step for this long: print the stacks of all threads and exit with 42; 1e6: practically never (default: 20.0)'
    other_minutes: float
    'the same for compiling, restoring, saving, and one batch of an evaluation (default: 60.0)'

class SpikeSection(_Fields):
    '`config.spike`.'
    factor: float
    'a loss this many times the running mean of its absolute value counts as a bad step; 0: off (default: 0.0)'
    memory: int
    'length of the running mean in steps; as many steps at the beginning are never spikes (default: 100)'

class AuditSection(_Fields):
    '`config.audit`.'
    every: int
    'steps between audits, which compare every copy of the state; also before each save; 0: never (default: 100)'
    differing: Literal['rollback', 'majority']
    "what copies that differ after steps may have used them do: rollback: restore the last checkpoint; majority: most copies replace the others, and the run continues (default: 'rollback')"
    replay_every: int
    'steps between replays, in which two devices compute the gradient of the same images; 0: never (default: 0)'
    checker_every: int
    "TPUs: steps between those that run libtpu's checker, which computes everything twice; 0: never (default: 0)"
    most: int
    'how often a host may be at fault before the run ends with exit code 42 (default: 3)'

class ReferenceSection(_Fields):
    '`config.reference`.'
    curve: str
    "name of a curve in the package, path of a curve's file or of a run; '': none (default: '')"
    stop_below: float
    'end the run this many points (of %) below the curve and its seeds, on average of 3 evaluations; 0: never (default: 0.0)'
    stop_after: str
    "stop_below: how much of the run is let pass before (default: '10%')"

class RunConfig(_Fields):
    "A run's config, of recipes."
    seed: int
    'of everything random: initialisation, order, crops, augmentation, dropout (default: 0)'
    duration: str
    "how long to train: steps, epochs or examples; '4 epochs, at least 300 steps' is the longer of two (default: '10 epochs')"
    batch_size: int
    'examples in a step, over all devices and hosts (default: 128)'
    accumulate: int
    'gradient accumulation: parts that a batch is split into, computed one after the other to save memory (default: 1)'
    init_from: str
    "checkpoint to start from: a run, a file that 'vit_jax show' knows, or hf://OWNER/NAME (default: '')"
    init_reset: _Tuple
    "init_from: patterns of parameters that are re-initialised; of some layers encoder/layers[-2:]/.*; what the objective owns begins with objective/ (default: ('(exit_\\\\d+/)?head(_distilled)?/.*',))"
    init_resize: Literal['scipy', 'bilinear', 'bicubic', 'torch', 'dinov2']
    "init_from: how position embeddings are resized; torch: as transformers does, dinov2: as DINOv2 (default: 'scipy')"
    init_channels: Literal['error', 'mean']
    "init_from: if the images have other channels than the checkpoint's; error: refuse; mean: each channel gets the mean of the checkpoint's kernels, scaled to the same sum (default: 'error')"
    nonfinite: Literal['stop', 'skip', 'rollback']
    "what a non-finite loss or gradient, or a spike, does: stop: end the run; skip: skip the update; rollback: restore the last checkpoint and skip the data (rollback_skip) (default: 'stop')"
    max_skips: int
    'nonfinite=skip: how many updates in a row are skipped before the run ends with an error (default: 10)'
    rollback_skip: str
    "nonfinite=rollback: how much data is skipped, starting with the bad step's (default: '1 step')"
    max_rollbacks: int
    'nonfinite=rollback: how many rollbacks a run may have before it ends with an error (default: 10)'
    compilation_cache: str
    "directory of compiled programs; only you should be able to write to it; auto: ~/.cache/vit_jax/xla, or WORKDIR/compiled for several processes and in buckets; '': none (default: 'auto')"
    deterministic: bool
    'GPUs: only kernels that add in the same order every time, chosen without timing them, so that a restart gives the same bits; slower. CPUs and TPUs need no such option (default: False)'
    model: ModelSection
    objective: ObjectiveSection
    data: DataSection
    pseudo: PseudoSection
    augment: AugmentSection
    optim: OptimSection
    lora: LoraSection
    mesh: MeshSection
    eval: EvalSection
    checkpoint: CheckpointSection
    log: LogSection
    hosts: HostsSection
    spike: SpikeSection
    audit: AuditSection
    reference: ReferenceSection

class ModelOptions(TypedDict, total=False):
    'Options of models.'
    channels: int
    num_classes: int
    head_init: Literal['zeros', 'normal']
    head_bias: float
    dtype: Literal['float32', 'bfloat16']
    dtype_on_cpu: Literal['auto', 'float32', 'same']
    remat: Literal['auto', 'none', 'save_products', 'save_attention', 'full']
    unroll: int
    patch: int
    depth: int
    width: int
    mlp_dim: int
    heads: int
    pool: Literal['token', 'mean', 'map', 'first', 'gem', 'token_mean']
    position: Literal['learned', 'learned2d', 'factorized', 'coordinates', 'sincos2d', 'fixed2d', 'relative', 'bias2d', 'transformer_xl', 'deberta', 'none', 'sinusoid']
    registers: int
    distilled: bool
    representation: int
    dropout: float
    attention_dropout: float
    drop_path: float
    attention: Literal['auto', 'xla', 'cudnn', 'short', 'splash']
    activation: Literal['gelu_tanh', 'gelu', 'quick_gelu', 'silu', 'relu6', 'hard_swish']
    epsilon: float
    keep_class_token: bool
    pool_prefix: bool
    map_heads: int
    map_mlp_dim: int
    last_norm: Literal['tokens', 'pooled', 'none']
    weighted_layers: bool
    distillation_head: bool
    patch_bias: bool
    patch_norm: bool
    pre_norm: bool
    crop_to_patches: bool
    position_at: Literal['auto', 'stem', 'layers', 'shared']
    position_of_class: bool
    position_of_registers: bool
    native_resize: Literal['bilinear', 'bicubic', 'linear']
    native_aspect: bool
    rope: Literal['none', 'axial', 'centred', 'mixed']
    rope_theta: float
    rope_grid: tuple[Any, ...] | list[Any]
    rope_offset: float
    rope_registers: float
    rope_shift: float
    rope_jitter: float
    rope_rescale: float
    parallel: bool
    block_branches: int
    differential: bool
    norm: Literal['layer', 'rms']
    norm_bias: bool
    norm_after: bool
    norm_residual: bool
    qk_norm: bool
    attention_inner_norm: bool
    mlp_inner_norm: bool
    qkv_bias: bool
    key_bias: bool
    projection_bias: bool
    gated_mlp: bool
    layer_scale: Literal['none', 'all', 'attention']
    layer_scale_init: float
    token_merging: int
    drop_path_by: Literal['depth', 'constant']
    init: Literal['vit', 'deit']
    units: tuple[Any, ...] | list[Any]
    width_factor: float
    epsilons: Literal['official', 'timm']
    token_mlp_dim: int
    preactivation: bool
    root_zeros: bool
    fixed_statistics: bool
    stages: tuple[Any, ...] | list[Any]
    conv_stem: bool
    reattention_norm: bool
    scaled_maps: bool
    residual_scale: float
    gate: Literal['none', 'se', 'eca', 'eca_hard']
    reduction: int
    small_patch: int
    small_width: int
    small_mlp_dim: int
    depths: tuple[Any, ...] | list[Any]
    large_image_size: int | str | tuple[Any, ...]
    convolutional_stem: bool
    qk_scale: float
    first_split: tuple[Any, ...] | list[Any]
    token_width: int
    token_attention: Literal['performer', 'full']
    random_features: int
    token_bias: bool
    token_dropout: float
    class_depth: int
    class_tokens: int
    summary: tuple[Any, ...] | list[Any]
    table_side: int
    table_corners: bool
    feature_reuse: bool
    feature_hidden: int
    feature_width: int
    relation_reuse: bool
    backbone: Literal['t2t', 'deit']
    grids: tuple[Any, ...] | list[Any]
    windows: tuple[Any, ...] | list[Any]
    position_grid: tuple[Any, ...] | list[Any]

class LoadOptions(ModelOptions, total=False):
    'Options of models of checkpoints.'
    image_size: int | str | tuple[int, int]

class ComputeOptions(TypedDict, total=False):
    'How a model is computed.'
    dtype: Literal['float32', 'bfloat16']
    dtype_on_cpu: Literal['auto', 'float32', 'same']
    remat: Literal['auto', 'none', 'save_products', 'save_attention', 'full']
    unroll: int
    attention: Literal['auto', 'xla', 'cudnn', 'short', 'splash']

class EvaluateFields(TypedDict, total=False):
    'Fields of the config that an evaluation reads, their dots as two underscores.'
    batch_size: int
    init_resize: Literal['scipy', 'bilinear', 'bicubic', 'torch', 'dinov2']
    model__dtype: Literal['float32', 'bfloat16'] | None
    model__dtype_on_cpu: Literal['auto', 'float32', 'same'] | None
    model__remat: Literal['auto', 'none', 'save_products', 'save_attention', 'full'] | None
    model__unroll: int | None
    model__attention: Literal['auto', 'xla', 'cudnn', 'short', 'splash'] | None
    objective__loss: Literal['softmax', 'sigmoid', 'binary'] | None
    data__name: str
    data__path: str
    data__image_feature: str
    data__mask_feature: str
    data__mask_table: str
    data__mixture: tuple[Any, ...] | list[Any]
    data__train_split: str
    data__eval_split: str
    data__holdout: float
    data__holdout_from: str
    data__layout: Literal['auto', 'classes', 'splits', 'parts']
    data__mask_files: Literal['ask', 'skip', 'keep']
    data__label_separator: str
    data__class_order: Literal['ask', 'numbers', 'texts']
    data__holdout_by: Literal['file', 'class']
    data__examine: bool
    data__sampling: Literal['uniform', 'balanced']
    data__image_size: int | str | tuple[Any, ...]
    data__size_schedule: tuple[Any, ...] | list[Any]
    data__patch_sizes: tuple[Any, ...] | list[Any]
    data__native_tokens: int
    data__native_lengths: tuple[Any, ...] | list[Any]
    data__native_budget: int
    data__native_multiple: int
    data__native_loss: Literal['none', 'sqrt', 'linear']
    data__native_rate: Literal['none', 'sqrt', 'linear']
    data__native_patch: int
    data__channels: int
    data__interpolation: Literal['bilinear', 'bicubic', '']
    data__views: tuple[Any, ...] | list[Any]
    data__view_sizes: tuple[Any, ...] | list[Any]
    data__eval_crop: Literal['central', 'torchvision', 'transformers', 'squash', 'resize']
    data__eval_resize: int
    data__mean: tuple[Any, ...] | list[Any]
    data__std: tuple[Any, ...] | list[Any]
    data__permute: Literal['none', 'patches', 'pixels in patches', 'both', 'all pixels']
    data__permute_patch: int
    data__threads: int
    data__read_ahead: float
    data__cache: str
    data__cache_gib: float
    data__prefetch: int
    data__max_pixels: int
    data__max_value: int
    data__on_bad_image: Literal['error', 'skip']
    data__max_bad_images: int
    eval__batch_size: int
    eval__evaluators: tuple[Any, ...] | list[Any]
    eval__thresholds: tuple[Any, ...] | list[Any]

class PreprocessingOptions(TypedDict, total=False):
    'How images are prepared.'
    interpolation: Literal['bilinear', 'bicubic', '']
    eval_crop: Literal['central', 'torchvision', 'transformers', 'squash', 'resize']
    eval_resize: int
    mean: tuple[Any, ...] | list[Any]
    std: tuple[Any, ...] | list[Any]

class ExportOptions(TypedDict, total=False):
    'Options of an export.'
    batch_size: int
    normalization: Literal['inside', 'beside']
    precision: Literal['float32', 'bfloat16', 'int8', 'float16']
    outputs: Sequence
    files: Any

class PushOptions(TypedDict, total=False):
    'Options of an upload.'
    format: Literal['', 'timm', 'huggingface']
    private: bool
    license: str
    overwrite: bool
    dry_run: bool

ModelName = Literal['ViT-mu/16', 'ViT-s/28', 'ViT-s/16', 'ViT-Ti/16', 'ViT-S/32', 'ViT-S/16', 'ViT-M/16', 'ViT-B/32', 'ViT-B/16', 'ViT-B/8', 'ViT-L/32', 'ViT-L/16', 'ViT-So400m/14', 'ViT-H/14', 'ViT-g/14', 'ViT-g-opt/16', 'ViT-G/14', 'ViT-G-opt/16', 'ViT-e/14', 'ViT-22B/14', 'DeiT-Ti/16', 'DeiT-S/16', 'DeiT-B/16', 'R+ViT-Ti/16', 'R26+ViT-S/32', 'R26+ViT-B/32', 'R50+ViT-B/32', 'R50+ViT-B/16', 'R50+ViT-L/32', 'R50+ViT-L/16', 'Mixer-S/32', 'Mixer-S/16', 'Mixer-B/32', 'Mixer-B/16', 'Mixer-L/32', 'Mixer-L/16', 'Mixer-H/14', 'BiT-R26x1', 'BiT-R50x1', 'BiT-R50x2', 'BiT-R50x3', 'BiT-R101x1', 'BiT-R101x3', 'BiT-R152x1', 'BiT-R152x2', 'BiT-R152x4', 'BiT-R200x3', 'ResNet-R26x1', 'ResNet-R50x1', 'ResNet-R50x2', 'ResNet-R101x1', 'ResNet-R152x1', 'ResNet-R152x2', 'DeepViT-16', 'DeepViT-24', 'DeepViT-32', 'DeepViT-S', 'DeepViT-L', 'LocalViT-T', 'LocalViT-T-SE4', 'LocalViT-S', 'CrossViT-Ti', 'CrossViT-S', 'CrossViT-B', 'CrossViT-9', 'CrossViT-15', 'CrossViT-18', 'CrossViT-9-dagger', 'CrossViT-15-dagger', 'CrossViT-18-dagger', 'T2T-ViT-7', 'T2T-ViT-10', 'T2T-ViT-12', 'T2T-ViT-14', 'T2T-ViT-19', 'T2T-ViT-24', 'T2T-ViT_t-14', 'T2T-ViT_t-19', 'T2T-ViT_t-24', 'CaiT-XXS24', 'CaiT-XXS36', 'CaiT-XS24', 'CaiT-S24', 'CaiT-S36', 'CaiT-M36', 'CaiT-M48', 'C-RADIOv3-B/16', 'C-RADIOv3-L/16', 'C-RADIOv3-H/16', 'C-RADIOv3-g/16', 'C-RADIOv4-So400m/16', 'C-RADIOv4-H/16', 'DVT-T2T-ViT-12', 'DVT-T2T-ViT-14', 'DVT-DeiT-S', 'FF-Ti/16', 'FF-B/16', 'FF-L/32', 'EfficientNet-B0', 'EfficientNet-B1', 'EfficientNet-B2', 'EfficientNet-B3', 'EfficientNet-B4', 'EfficientNet-B5', 'EfficientNet-B6', 'EfficientNet-B7', 'EfficientNet-L2', 'Axial-ViT-B/16', 'Axial-ViT-B/32', 'AxialResNet-50']
CheckpointFormat = Literal['orbax', 'peft', 'official', 'big_vision', 'huggingface', 'authors', 'timm']
