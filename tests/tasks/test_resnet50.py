from __future__ import annotations

import pytest
import torch

import bigbatch as bb
from bigbatch.tasks.finding import find_task
from bigbatch.tasks.resnet50 import Images, MadeImages
from bigbatch.tasks.shapes import find_shape


@pytest.fixture
def folder(tmp_path):
    """Two classes: red images, wide ones, and blue ones, high ones; and a file that is no image."""
    Image = pytest.importorskip("PIL.Image")
    for name, color, size in (("blue", (0, 0, 255), (50, 90)), ("red", (255, 0, 0), (90, 50))):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("RGB", size, color).save(tmp_path / name / f"{number}.png")
    (tmp_path / "red" / "notes.txt").write_text("none")
    return tmp_path


def test_the_task_is_the_shape_that_plan_plans():
    with torch.device("meta"):
        model, shape_model = find_task("resnet50").model(), find_shape("resnet50").model()

    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in shape_model.named_parameters()}
    assert find_task("resnet50").batch_size == 64
    assert find_task("resnet50").train_data()[0][0].shape == (3, 224, 224)
    assert find_task("resnet50", image_size=96).train_data()[0][0].shape == (3, 96, 96)


def test_made_images_are_the_same_each_time_and_their_classes_can_be_told_apart():
    data = MadeImages(32, num_samples=200)
    images, labels = torch.stack([data[i][0] for i in range(200)]), torch.tensor([data[i][1] for i in range(200)])
    means = torch.stack([images[:100][labels[:100] == label].mean(0) for label in range(10)])
    nearest = torch.cdist(images[100:].flatten(1), means.flatten(1)).argmin(1)

    assert torch.equal(data[7][0], MadeImages(32)[7][0])
    assert not torch.equal(data[7][0], data[17][0])  # of one class, under other noise
    assert (nearest == labels[100:]).float().mean() > 0.9


def test_images_of_a_folder(folder):
    data = Images(folder, 32)

    assert (data.classes, len(data)) == (("blue", "red"), 6)
    for index in range(6):
        image, label = data[index]
        assert image.shape == (3, 32, 32)
        channels = image.mean((1, 2))
        assert (channels[2] > channels[0]) == (label == 0)
    white = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert data[0][0][2].mean() == pytest.approx(float(white[2]), abs=1e-5)
    batch, labels = next(iter(torch.utils.data.DataLoader(data, batch_size=6)))
    assert (batch.shape, labels.tolist()) == ((6, 3, 32, 32), [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(("name", "message"), [("red", "has 0 folders with 0 images"), ("none", "There is no folder")])
def test_a_folder_without_classes_is_refused(folder, name, message):
    with pytest.raises(bb.TaskError, match=message):
        Images(folder / name, 32)


def test_an_image_that_is_too_small_is_refused():
    with pytest.raises(bb.OptionError, match="at least 32 pixels"):
        find_task("resnet50", image_size=16)
