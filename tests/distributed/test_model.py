"""`ExpertParallel`: modules and models over ranks against one process; checkpoints; FSDP2; the report."""

import ep_model
import pytest
import torch

RANKS = (2, 3, 4)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("how", ["eager", "checkpoint", "reentrant checkpoint"])
def test_a_layer(group_of, ranks, how):
    group_of(ranks).run(ep_model.as_one_process, how)


def test_gradients_accumulate(group_of):
    group_of(2).run(ep_model.as_one_process, "eager", 3)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("experts", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
def test_activations_of_another_dtype(group_of, experts, x, autocast):
    group_of(2).run(ep_model.other_dtypes, experts, x, autocast)


def test_vmap_is_refused_by_name(group_of):
    assert all("torch.func (vmap" in said for said in group_of(2).run(ep_model.under_vmap))


@pytest.mark.parametrize("ranks", RANKS)
def test_parameters_are_sharded(group_of, ranks):
    group_of(ranks).run(ep_model.sharded)


def test_what_cannot_be_done_is_said(group_of):
    unknown, more, uneven, twice, none = group_of(2).run(ep_model.refused)[0]
    assert "Binding" in unknown and "Experts" in unknown
    assert "also has scale" in more
    assert "'w2': 4" in uneven
    assert "already" in twice
    assert "no experts" in none


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_hugging_face(group_of, family):
    """Stored [E, out, in] and [E, in, out], with and without biases."""
    group_of(2).run(ep_model.hugging_face, family, "eager")


@pytest.mark.parametrize("how", ["aot_eager", "compiled checkpoint"])
def test_compiled(group_of, how):
    group_of(2).run(ep_model.as_one_process, how)


@pytest.mark.slow
def test_compiled_by_our_backend(group_of):
    group_of(2).run(ep_model.as_one_process, "mok")


def test_the_report_shows_the_ranks(group_of):
    for sites, text in group_of(2).run(ep_model.reported):
        assert sites == [
            ("experts_parallel", "6 experts over 2 ranks (transport collectives)", "fused", "portable"),
        ]
        assert "6 experts over 2 ranks" in text


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 4)])
def test_checkpoints_between_sizes(group_of, tmp_path, before, after):
    group_of(before).run(ep_model.saved, str(tmp_path))
    group_of(after).run(ep_model.loaded, str(tmp_path))


def test_the_full_model_can_be_saved(group_of, tmp_path):
    group_of(2).run(ep_model.full_state, str(tmp_path))


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_inference(group_of, how):
    group_of(2).run(ep_model.without_gradients, how)


def test_what_nobody_reads_is_not_saved(group_of):
    group_of(2).run(ep_model.saved_nothing)


@pytest.mark.parametrize("ranks, ep, experts", [(2, 2, 6), (4, 2, 6), (4, 2, 5)])
def test_fsdp(group_of, ranks, ep, experts):
    group_of(ranks).run(ep_model.with_fsdp, ep, experts)


@pytest.mark.parametrize("implementation", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_expert_parallelism_of_hugging_face(group_of, implementation, compiled):
    """It keeps working, and its experts are fused with the op of one rank."""
    said = group_of(2).run(ep_model.hugging_faces_own, implementation, compiled)
    assert not compiled or all(fused == 1 for fused, _ in said), said


def test_hsdp(group_of):
    group_of(4).run(ep_model.with_hsdp)


def test_experts_of_an_older_release():
    """transformers 5.17 does not say whether there is a norm behind the experts: there is none."""
    import hf

    from mok_compile.distributed import find_experts

    model, _ = hf.make("mixtral", num_hidden_layers=1)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.__dict__.pop("has_post_expert_norm", None)
    (binding,) = find_experts(model).values()
    assert binding.down == "down_proj" and binding.up == ("gate_up_proj",)
